// The inner loops of verify_attn on the CPU, for each instruction set.
//
// Idea: written once with vectors of W floats (GCC's vector extension), instantiated in functions that are compiled
// for one instruction set each; this file alone is compiled with contraction, so that a product and a sum are one
// instruction where there is one. Register blocks: R query rows by C cache rows (or C vectors of columns), each
// accumulator W partial sums, which are added up at the end: a score is made of float32 sums of 36 products each,
// what a block adds to the results of 64.
//
// Everything here is inlined into those functions: nothing of the standard library may be emitted from this file,
// or the linker could take a version with instructions that other processors do not have (.ci/run looks for such).
//
// Limits: GCC's extension (Clang's was not tried). Tried and lost: lanes summed through memory (products 133
// GFLOP/s a core instead of 216), prefetches of the next block (plans/0008-cpu.md).
#include "attn_tile.hpp"

#include "floats.hpp"

namespace kdt::cpu {
namespace {

#define KDT_INLINE inline __attribute__((always_inline))

constexpr int32_t kShort = 36;  // products in a row in one float32 sum: 576 by vectors of 16

template <int W>
struct Simd {
  typedef float V __attribute__((vector_size(W * 4)));
  typedef int32_t I __attribute__((vector_size(W * 4)));
  typedef float FromMemory __attribute__((vector_size(W * 4), aligned(4), may_alias));

  static KDT_INLINE V load(const float* p) { return *reinterpret_cast<const FromMemory*>(p); }
  static KDT_INLINE void store(float* p, V v) { *reinterpret_cast<FromMemory*>(p) = v; }
  static KDT_INLINE V all(float x) { return V{} + x; }
  // Sum of the lanes, in pairs.
  static KDT_INLINE float sum(V v) {
    float lanes[W];
    store(lanes, v);
#pragma GCC unroll 8
    for (int step = W / 2; step > 0; step /= 2) {
#pragma GCC unroll 16
      for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    }
    return lanes[0];
  }
};

// Lanes of a, and from W on of b.
template <int W>
KDT_INLINE typename Simd<W>::V shuffle(const typename Simd<W>::V& a, const typename Simd<W>::V& b,
                                       const typename Simd<W>::I& from) {
#if defined(__clang__)
  typename Simd<W>::V result = {};
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) result[i] = from[i] < W ? a[from[i]] : b[from[i] - W];
  return result;
#else
  return __builtin_shuffle(a, b, from);
#endif
}

// Sums of the lanes of four vectors. Each step adds what pairs of vectors have in common: after two, every four
// lanes hold one of each.
template <int W>
KDT_INLINE void sum_four(const typename Simd<W>::V& a, const typename Simd<W>::V& b, const typename Simd<W>::V& c,
                         const typename Simd<W>::V& d, float* result) {
  using V = typename Simd<W>::V;
  using I = typename Simd<W>::I;
  I low = {}, high = {}, even = {}, odd = {};
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    low[i] = i / 4 * 4 + i % 4 / 2 + i % 2 * W;  // a0 b0 a1 b1 of every four, then a2 b2 a3 b3
    high[i] = i / 4 * 4 + i % 4 / 2 + i % 2 * W + 2;
    even[i] = i / 4 * 4 + i % 2 + i % 4 / 2 * W;  // one of each, then the other half of each
    odd[i] = i / 4 * 4 + i % 2 + i % 4 / 2 * W + 2;
  }
  const V first = shuffle<W>(a, b, low) + shuffle<W>(a, b, high);
  const V second = shuffle<W>(c, d, low) + shuffle<W>(c, d, high);
  const V fours = shuffle<W>(first, second, even) + shuffle<W>(first, second, odd);
  typedef float Four __attribute__((vector_size(16)));
  Four parts[W / 4];
  __builtin_memcpy(parts, &fours, sizeof fours);
#pragma GCC unroll 4
  for (int i = 1; i < W / 4; ++i) parts[0] += parts[i];
  __builtin_memcpy(result, parts, 16);
}

template <int W, int R, int C>
KDT_INLINE void multiply(const float* q, const float* const* keys, int32_t count, float* scores) {
  using S = Simd<W>;
  for (int32_t c0 = 0; c0 < kBlock; c0 += C) {
    for (int32_t r0 = 0; r0 < count; r0 += R) {
      typename S::V sums[R][C] = {};
      for (int32_t d0 = 0; d0 < kQkDim; d0 += kShort * W) {
        typename S::V part[R][C] = {};
        for (int32_t d = d0; d < d0 + kShort * W; d += W) {
          typename S::V key[C];
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) key[c] = S::load(keys[c0 + c] + d);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const typename S::V query = S::load(q + (r0 + r) * kQkDim + d);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) part[r][c] += query * key[c];
          }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) sums[r][c] += part[r][c];
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c += 4) {
          sum_four<W>(sums[r][c], sums[r][c + 1], sums[r][c + 2], sums[r][c + 3],
                      scores + (r0 + r) * kBlock + c0 + c);
        }
      }
    }
  }
}

template <int W, int R, int C>
KDT_INLINE void add(const float* weights, const float* const* keys, int32_t count, float* sums) {
  using S = Simd<W>;
  for (int32_t d0 = 0; d0 < kVDim; d0 += C * W) {
    for (int32_t r0 = 0; r0 < count; r0 += R) {
      typename S::V part[R][C] = {};
      for (int32_t k = 0; k < kBlock; ++k) {
        typename S::V value[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) value[c] = S::load(keys[k] + d0 + c * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const typename S::V weight = S::all(weights[(r0 + r) * kBlock + k]);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) part[r][c] += weight * value[c];
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          float* at = sums + (r0 + r) * kVDim + d0 + c * W;
          S::store(at, S::load(at) + part[r][c]);
        }
      }
    }
  }
}

// As add(), to the bit, for one row and the keys of `mask` alone.
template <int W>
KDT_INLINE void add_some(const float* weights, const float* const* keys, uint64_t mask, float* sums) {
  using S = Simd<W>;
  for (int32_t d = 0; d < kVDim; d += W) {
    typename S::V part = {};
    for (uint64_t rest = mask; rest != 0; rest &= rest - 1) {
      const int k = __builtin_ctzll(rest);
      part += S::all(weights[k]) * S::load(keys[k] + d);
    }
    S::store(sums + d, S::load(sums + d) + part);
  }
}

// exp of numbers <= 0: 2^n times a polynomial in what is left, of degree 6 (coefficients of Cephes' expf, S.
// Moshier).
template <int W>
KDT_INLINE typename Simd<W>::V exp_of(typename Simd<W>::V x) {
  using S = Simd<W>;
  using V = typename S::V;
  using I = typename S::I;
  const I vanishes = x < S::all(-87.3f);
  x = vanishes ? S::all(0.0f) : x;
  const V shifted = x * S::all(1.44269504f) + S::all(12582912.0f);  // 1.5 * 2^23: rounds to a whole number
  const V n = shifted - S::all(12582912.0f);
  const V r = (x - n * S::all(0.693359375f)) - n * S::all(-2.12194440e-4f);
  V y = S::all(1.9875691500e-4f);
  y = y * r + S::all(1.3981999507e-3f);
  y = y * r + S::all(8.3334519073e-3f);
  y = y * r + S::all(4.1665795894e-2f);
  y = y * r + S::all(1.6666665459e-1f);
  y = y * r + S::all(5.0000001201e-1f);
  y = y * (r * r) + r + S::all(1.0f);
  const I power = (reinterpret_cast<I>(shifted) << 23) + (127 << 23);  // the low bits of `shifted` are n
  return vanishes ? S::all(0.0f) : y * reinterpret_cast<V>(power);
}

// -1 for the lanes whose bit is set, from bit `first` on.
template <int W>
KDT_INLINE typename Simd<W>::I lanes_of(uint64_t mask, int32_t first) {
  using I = typename Simd<W>::I;
  I lane = {};
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) lane[i] = i;
  return (((I{} + static_cast<int32_t>(mask >> first)) >> lane) & 1) != 0;
}

template <int W>
KDT_INLINE float scale_and_mask(float* x, uint64_t mask, float factor, float least, bool* nan) {
  using S = Simd<W>;
  using V = typename S::V;
  V top = S::all(least);
  typename S::I bad = {};
  for (int32_t i = 0; i < kBlock; i += W) {
    const V scaled = lanes_of<W>(mask, i) ? S::load(x + i) * factor : S::all(-__builtin_inff());
    S::store(x + i, scaled);
    bad |= scaled != scaled;
    top = scaled > top ? scaled : top;
  }
  float lanes[W];
  S::store(lanes, top);
  int32_t any = 0;
  for (int i = 0; i < W; ++i) {
    any |= bad[i];
    least = lanes[i] > least ? lanes[i] : least;
  }
  *nan = any != 0;
  return least;
}

template <int W>
KDT_INLINE bool are_finite(const float* x, int32_t count) {
  using S = Simd<W>;
  typename S::I bad = {};
  for (int32_t i = 0; i < count; i += W) {
    const typename S::V v = S::load(x + i);
    bad |= (v - v) != S::all(0.0f);  // inf - inf and NaN are NaN
  }
  int32_t any = 0;
  for (int i = 0; i < W; ++i) any |= bad[i];
  return any == 0;
}

template <int W>
KDT_INLINE double exponentiate(float* x, uint64_t mask, float top) {
  using S = Simd<W>;
  using V = typename S::V;
  V sum = {};
  for (int32_t i = 0; i < kBlock; i += W) {
    const V weight = exp_of<W>(lanes_of<W>(mask, i) ? S::load(x + i) - top : S::all(-100.0f));
    S::store(x + i, weight);
    sum += weight;
  }
  return static_cast<double>(S::sum(sum));
}

template <int W>
KDT_INLINE void scale(float* y, int32_t count, float factor) {
  for (int32_t i = 0; i < count; i += W) Simd<W>::store(y + i, Simd<W>::load(y + i) * factor);
}

KDT_INLINE void widen_bf16(const uint16_t* from, int32_t count, float* to) {
  for (int32_t i = 0; i < count; ++i) to[i] = float_from_bf16(from[i]);
}
KDT_INLINE void widen_f16(const uint16_t* from, int32_t count, float* to) {
  for (int32_t i = 0; i < count; ++i) to[i] = float_from_f16(from[i]);
}

// The functions for one set: vectors of W floats, register blocks of R rows by C.
#define KDT_ATTN_TILE(name, target, W, R, C)                                                                   \
  struct name {                                                                                                \
    target static void multiply(const float* q, const float* const* keys, int32_t count, float* scores) {      \
      kdt::cpu::multiply<W, R, C>(q, keys, count, scores);                                                     \
    }                                                                                                          \
    target static void add(const float* weights, const float* const* keys, int32_t count, float* sums) {       \
      kdt::cpu::add<W, R, C>(weights, keys, count, sums);                                                      \
    }                                                                                                          \
    target static double exponentiate(float* x, uint64_t mask, float top) {                                    \
      return kdt::cpu::exponentiate<W>(x, mask, top);                                                          \
    }                                                                                                          \
    target static void add_some(const float* weights, const float* const* keys, uint64_t mask, float* sums) {  \
      kdt::cpu::add_some<W>(weights, keys, mask, sums);                                                        \
    }                                                                                                          \
    target static float scale_and_mask(float* x, uint64_t mask, float factor, float least, bool* nan) {        \
      return kdt::cpu::scale_and_mask<W>(x, mask, factor, least, nan);                                         \
    }                                                                                                          \
    target static bool are_finite(const float* x, int32_t count) { return kdt::cpu::are_finite<W>(x, count); } \
    target static void scale(float* y, int32_t count, float factor) { kdt::cpu::scale<W>(y, count, factor); }  \
    target static void widen_bf16(const uint16_t* from, int32_t count, float* to) {                            \
      kdt::cpu::widen_bf16(from, count, to);                                                                   \
    }                                                                                                          \
    target static void widen_f16(const uint16_t* from, int32_t count, float* to) {                             \
      kdt::cpu::widen_f16(from, count, to);                                                                    \
    }                                                                                                          \
    static constexpr AttnTile kTable = {multiply,   add,   add_some,   scale_and_mask, exponentiate,           \
                                        are_finite, scale, widen_bf16, widen_f16};                             \
  };

KDT_ATTN_TILE(Scalar, , 4, 2, 4)
#if defined(__x86_64__)
KDT_ATTN_TILE(Avx2, __attribute__((target("avx2,fma,f16c"))), 8, 2, 4)
KDT_ATTN_TILE(Avx512, __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), 16, 4, 4)
#endif

}  // namespace

const AttnTile& attn_tile(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return Avx512::kTable;
  if (isa == Isa::kAvx2) return Avx2::kTable;
#endif
  static_cast<void>(isa);
  return Scalar::kTable;
}

}  // namespace kdt::cpu
