# Defines newer_grpc::archives, all static libraries of this prefix and their headers, for the package files beside it. The
# libraries refer to each other in circles, so the linker searches them as one group, and takes what is used.
if(NOT TARGET newer_grpc::archives)
  get_filename_component(newer_grpc_prefix ${CMAKE_CURRENT_LIST_DIR}/../.. ABSOLUTE)
  file(GLOB newer_grpc_archives ${newer_grpc_prefix}/lib/*.a)
  list(JOIN newer_grpc_archives "," newer_grpc_archives)
  find_package(Threads REQUIRED)
  add_library(newer_grpc::archives INTERFACE IMPORTED)
  set_target_properties(newer_grpc::archives PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES ${newer_grpc_prefix}/include
    INTERFACE_LINK_LIBRARIES "$<LINK_GROUP:RESCAN,${newer_grpc_archives}>;Threads::Threads;dl;rt"
    # No other library of the process may use the symbols, such as those of OpenSSL.
    INTERFACE_LINK_OPTIONS LINKER:--exclude-libs,ALL)
endif()

# newer_grpc_targets(NAMES...): defines targets that stand for the archives.
function(newer_grpc_targets)
  foreach(name IN LISTS ARGV)
    if(NOT TARGET ${name})
      add_library(${name} INTERFACE IMPORTED)
      set_target_properties(${name} PROPERTIES INTERFACE_LINK_LIBRARIES newer_grpc::archives)
    endif()
  endforeach()
endfunction()
