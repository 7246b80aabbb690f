# Functions that define this project's targets, so that flags and include paths are set in one place.

set(LOGPROBD_WARNINGS -Wall -Wextra -Wconversion -Werror)
# Newer versions of Abseil deprecate spellings for which Debian's has no replacement, such as MutexLock(&mutex).
if(NOT absl_VERSION VERSION_EQUAL 20220623)
  list(APPEND LOGPROBD_WARNINGS -Wno-error=deprecated-declarations)
endif()

function(logprobd_target_settings target)
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR})
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${LOGPROBD_WARNINGS}>)
  # The programs read input of strangers: the C library checks the bounds of buffers that it writes to, and the tables of
  # functions are read-only from the start on. Tests do not need this.
  if(NOT LOGPROBD_IS_TEST)
    target_compile_options(${target} PRIVATE
      "$<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>")
    target_link_options(${target} PRIVATE LINKER:-z,relro,-z,now)
  endif()
  if(LOGPROBD_SANITIZE)
    target_compile_options(${target} PUBLIC
      $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${LOGPROBD_SANITIZE} -fno-omit-frame-pointer>
      # GCC's warning has false positives in instrumented code of the standard library.
      $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized>)
    target_link_options(${target} PUBLIC -fsanitize=${LOGPROBD_SANITIZE})
  endif()
endfunction()

# logprobd_library(name SOURCES ... [PUBLIC libs...] [PRIVATE libs...]) adds the library of a folder.
# Libraries are PRIVATE unless this library's headers include theirs; those are PUBLIC.
function(logprobd_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  logprobd_target_settings(${name})
  target_link_libraries(${name} PUBLIC ${ARG_PUBLIC} PRIVATE ${ARG_PRIVATE})
endfunction()

# logprobd_executable(name SOURCES ... LIBS ...) adds an executable.
function(logprobd_executable name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  logprobd_target_settings(${name})
  target_link_libraries(${name} PRIVATE ${ARG_LIBS})
endfunction()

# logprobd_test(name SOURCES ... LIBS ... [LABELS unit|gpu|integration|slow] [PREFIX prefix]) adds a
# GoogleTest binary and registers each of its tests with CTest. Without LABELS, the label is unit. A
# prefix distinguishes the tests of binaries that are built from the same sources.
function(logprobd_test name)
  cmake_parse_arguments(ARG "" "PREFIX" "SOURCES;LIBS;LABELS" ${ARGN})
  set(LOGPROBD_IS_TEST ON)
  logprobd_executable(${name} SOURCES ${ARG_SOURCES} LIBS ${ARG_LIBS} GTest::gmock_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  # Test code compiles a quarter faster at -O1. The tested code keeps its own flags.
  target_compile_options(${name} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  list(GET ARG_LABELS 0 label)
  gtest_discover_tests(${name} TEST_PREFIX "${ARG_PREFIX}" PROPERTIES LABELS "${label}" TIMEOUT 120 DISCOVERY_TIMEOUT 60)
  list(LENGTH ARG_LABELS count)
  if(count GREATER 1)
    # gtest_discover_tests accepts no list as the value of a property; the second label and TIMEOUT
    # would be lost. CTest reads the following file after the one that names the tests.
    set(labels_file ${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake)
    file(CONFIGURE OUTPUT ${labels_file} @ONLY CONTENT
"if(@name@_TESTS)
  set_tests_properties(\${@name@_TESTS} PROPERTIES LABELS \"@ARG_LABELS@\")
endif()
")
    set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${labels_file})
  endif()
endfunction()
