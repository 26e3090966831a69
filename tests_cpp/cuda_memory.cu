#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>

#include "cuda_memory.hpp"

namespace kdt_test::cuda {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorString(error));
}
#define CHECK(call) check((call), #call)

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

// A copy from pageable memory may return before the last of it has arrived, one on the device before it began.
void finish_copy() { CHECK(cudaStreamSynchronize(cudaStreamLegacy)); }

}  // namespace

std::string unavailable() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return count > 0 ? "" : "the driver lists no device";
}

int device_count() {
  int count = 0;
  CHECK(cudaGetDeviceCount(&count));
  return count;
}

int current_device() {
  int device = -1;
  CHECK(cudaGetDevice(&device));
  return device;
}

void set_device(int device) { CHECK(cudaSetDevice(device)); }

void* allocate(size_t bytes) {
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, std::max<size_t>(bytes, 1)));
  return memory;
}

void release(void* memory) { (void)cudaFree(memory); }

void* allocate_pinned(size_t bytes) {
  void* memory = nullptr;
  CHECK(cudaMallocHost(&memory, std::max<size_t>(bytes, 1)));
  return memory;
}

void release_pinned(void* memory) { (void)cudaFreeHost(memory); }

void upload(void* to_device, const void* from_host, size_t bytes) {
  CHECK(cudaMemcpy(to_device, from_host, bytes, cudaMemcpyHostToDevice));
  finish_copy();
}

void download(void* to_host, const void* from_device, size_t bytes) {
  CHECK(cudaMemcpy(to_host, from_device, bytes, cudaMemcpyDeviceToHost));
}

void copy(void* to_device, const void* from_device, size_t bytes) {
  CHECK(cudaMemcpy(to_device, from_device, bytes, cudaMemcpyDeviceToDevice));
  finish_copy();
}

void set_bytes(void* device, int value, size_t bytes) {
  CHECK(cudaMemset(device, value, bytes));
  finish_copy();
}

void* create_stream() {
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

void destroy_stream(void* stream) { (void)cudaStreamDestroy(stream_of(stream)); }

void synchronize(void* stream) { CHECK(cudaStreamSynchronize(stream_of(stream))); }

// In thread-local mode, as strict as the global one for this thread, other threads may allocate meanwhile.
void begin_capture(void* stream) {
  CHECK(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal));
}

void* end_capture(void* stream) {
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(stream_of(stream), &graph));
  cudaGraphExec_t executable = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
  (void)cudaGraphDestroy(graph);
  check(error, "cudaGraphInstantiate");
  return executable;
}

void launch_graph(void* graph, void* stream) {
  CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream)));
}

void destroy_graph(void* graph) { (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

std::string begin_spoiled_capture(void* stream) {
  CHECK(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeGlobal));
  if (cudaStreamSynchronize(stream_of(stream)) == cudaSuccess) throw std::runtime_error("the capture goes on");
  (void)cudaGetLastError();
  return cudaGetErrorString(cudaErrorStreamCaptureInvalidated);
}

void end_spoiled_capture(void* stream) {
  cudaGraph_t graph = nullptr;
  if (cudaStreamEndCapture(stream_of(stream), &graph) == cudaSuccess) (void)cudaGraphDestroy(graph);
  (void)cudaGetLastError();
}

}  // namespace kdt_test::cuda
