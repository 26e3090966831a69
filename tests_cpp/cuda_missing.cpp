// In place of cuda_memory.cu where the build has no CUDA: main.cpp asks unavailable(), and nobody calls the rest.
#include <stdexcept>

#include "cuda_memory.hpp"

namespace kdt_test::cuda {
namespace {

[[noreturn]] void missing() { throw std::logic_error("these tests were built without CUDA"); }

}  // namespace

std::string unavailable() { return "these tests were built without CUDA (-DKDTREE_CUDA=OFF, or no nvcc or GPU)"; }

int device_count() { missing(); }
int current_device() { missing(); }
void set_device(int) { missing(); }
void* allocate(size_t) { missing(); }
void release(void*) {}
void* allocate_pinned(size_t) { missing(); }
void release_pinned(void*) {}
void upload(void*, const void*, size_t) { missing(); }
void download(void*, const void*, size_t) { missing(); }
void copy(void*, const void*, size_t) { missing(); }
void set_bytes(void*, int, size_t) { missing(); }
void* create_stream() { missing(); }
void destroy_stream(void*) {}
void synchronize(void*) { missing(); }
void begin_capture(void*) { missing(); }
void* end_capture(void*) { missing(); }
void launch_graph(void*, void*) { missing(); }
void destroy_graph(void*) {}
std::string begin_spoiled_capture(void*) { missing(); }
void end_spoiled_capture(void*) { missing(); }

}  // namespace kdt_test::cuda
