include(${CMAKE_CURRENT_LIST_DIR}/../static_archives.cmake)
# The package's own list of targets is read for their names only, since its targets are shared libraries.
file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/abslTargets.cmake absl_names REGEX "^add_library\\(absl::")
list(TRANSFORM absl_names REPLACE "add_library\\((absl::[^ ]+) .*" "\\1")
newer_grpc_targets(${absl_names})
