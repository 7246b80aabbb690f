include(${CMAKE_CURRENT_LIST_DIR}/../static_archives.cmake)
newer_grpc_targets(gRPC::grpc++ gRPC::grpc++_reflection OpenSSL::Crypto OpenSSL::SSL)
