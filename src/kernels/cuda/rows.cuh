// Rows of logits on the device: eight at a time.
#pragma once

#include "common.cuh"

namespace kdt::cuda {

inline constexpr int kVectorSize = 8;
inline constexpr float kLog2E = 1.44269504f;

// As they lie in memory, in words that stay in registers.
template <class T>
struct alignas(16) Vector {
  static constexpr int kWords = kVectorSize * static_cast<int>(sizeof(T)) / 4;
  uint32_t words[kWords];

  __device__ float operator[](int e) const;
  // The same for a place that is not known when compiling: registers have no addresses.
  __device__ float at(int place) const {
    float value = 0.0f;
#pragma unroll
    for (int e = 0; e < kVectorSize; ++e) value = e == place ? (*this)[e] : value;
    return value;
  }
};
template <>
__device__ inline float Vector<float>::operator[](int e) const {
  return __uint_as_float(words[e]);
}
template <>
__device__ inline float Vector<__nv_bfloat16>::operator[](int e) const {
  return __uint_as_float(e % 2 == 0 ? words[e / 2] << 16 : words[e / 2] & 0xffff0000u);
}
template <>
__device__ inline float Vector<__half>::operator[](int e) const {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(words[e / 2] >> (e % 2 * 16))));
}

// Whether the row's vectors may be loaded whole.
__device__ inline bool is_aligned(const void* row) { return reinterpret_cast<uintptr_t>(row) % 16 == 0; }

// Logits first..first+7 of an aligned row that has them all.
template <class T>
__device__ Vector<T> load_whole_vector(const T* row, int64_t first) {
  Vector<T> v;
  constexpr int kPieces = sizeof(v) / sizeof(uint4);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    reinterpret_cast<uint4*>(&v)[i] = __ldg(reinterpret_cast<const uint4*>(row + first) + i);
  }
  return v;
}

// Of any row, and -inf beyond its end. `first` is a multiple of 8.
template <class T>
__device__ Vector<T> load_vector(const T* row, int64_t first, int64_t vocab_size) {
  constexpr int kEach = 4 / static_cast<int>(sizeof(T));  // logits a word
  Vector<T> v;
#pragma unroll
  for (int w = 0; w < Vector<T>::kWords; ++w) {
    T values[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t at = first + w * kEach + i;
      values[i] = at < vocab_size ? row[at] : from_float<T>(negative_infinity());
    }
    memcpy(&v.words[w], values, sizeof v.words[w]);
  }
  return v;
}

// Vectors begin..end-1 of a row.
struct VectorRange {
  int64_t begin, end;
};

// Calls use(vector, index) for the calling thread's share of a range, in ascending order. Whole vectors come first,
// kBatch loaded at a time.
template <int kThreads, int kBatch, class T, class Use>
__device__ void for_each_vector(const T* row, const VectorRange& range, int64_t vocab_size, Use&& use) {
  int64_t v = range.begin + threadIdx.x;
  if (is_aligned(row)) {
    const int64_t whole = min(range.end, vocab_size / kVectorSize);
    for (; v + (kBatch - 1) * kThreads < whole; v += kBatch * kThreads) {
      Vector<T> batch[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) batch[j] = load_whole_vector(row, (v + j * kThreads) * kVectorSize);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) use(batch[j], static_cast<int32_t>(v + j * kThreads));
    }
    for (; v < whole; v += kThreads) use(load_whole_vector(row, v * kVectorSize), static_cast<int32_t>(v));
  }
  for (; v < range.end; v += kThreads) use(load_vector(row, v * kVectorSize, vocab_size), static_cast<int32_t>(v));
}

// 2^x for x <= 0, to 2 units in the last place; results below 2^-126 are 0.
__device__ inline float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace kdt::cuda
