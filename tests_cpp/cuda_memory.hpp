// The CUDA runtime as far as the tests need it, without its headers. cuda_memory.cu is the real one;
// cuda_missing.cpp stands in for it in a build without CUDA.
//
// Streams and graphs are pointers, as in kdtree.h. Copies have finished when they return. A failure is thrown as
// std::runtime_error with CUDA's text.
#pragma once

#include <cstddef>
#include <string>

namespace kdt_test::cuda {

// Why tests cannot run on CUDA here; "" when they can.
std::string unavailable();

int device_count();
int current_device();
void set_device(int device);

// Memory of the current device, and memory of the host that the device can read. NULL may be freed.
void* allocate(size_t bytes);
void release(void* memory);
void* allocate_pinned(size_t bytes);
void release_pinned(void* memory);

void upload(void* to_device, const void* from_host, size_t bytes);
void download(void* to_host, const void* from_device, size_t bytes);
void copy(void* to_device, const void* from_device, size_t bytes);
void set_bytes(void* device, int value, size_t bytes);

// Streams of the current device that do not wait for the default stream, nor it for them.
void* create_stream();
void destroy_stream(void* stream);
void synchronize(void* stream);

// What this thread puts on the stream between the two becomes a graph; meanwhile it may not call what
// synchronises or allocates.
void begin_capture(void* stream);
void* end_capture(void* stream);
void launch_graph(void* graph, void* stream);
void destroy_graph(void* graph);

// Begins a capture in global mode and spoils it by a call that captures forbid: whatever is put on the stream fails
// from then on, until the end. Gives CUDA's text for that.
std::string begin_spoiled_capture(void* stream);
void end_spoiled_capture(void* stream);

}  // namespace kdt_test::cuda
