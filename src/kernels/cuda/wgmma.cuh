// Wrappers of the PTX of Hopper (sm_90a): matrix products of a warpgroup (wgmma), copies of boxes of a tensor
// (TMA), barriers in shared memory that count bytes, registers moved between warpgroups.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "mma.cuh"

namespace kdt::cuda {

// ---- matrix products ---------------------------------------------------------------------------------

// Operands in shared memory are tiles of 64 columns, 128 bytes a row, whose 16-byte chunk c of row r is at c ^ (r %
// 8) (TMA's and wgmma's 128-byte swizzle); tiles begin at multiples of 1,024 bytes. A descriptor names one, or the
// part of it that begins at `address`; only its low half is carried around, as the high one is the same for all:
constexpr uint32_t kTileHigh = 1u << 30 | 1024 / 16;
// ... whose rows are M or N, its 64 columns K; 16 of these are a product's, 32 bytes further the next 16.
__device__ inline uint32_t tile_by_rows(uint32_t address) { return 1u << 16 | (address & 0x3ffff) >> 4; }
// ... whose rows are K and whose columns are N, as are those of the tiles kTileBytes, 2 kTileBytes, ... after it;
// 16 rows are a product's, 2,048 bytes further the next 16.
template <uint32_t kTileBytes>
__device__ inline uint32_t tile_by_columns(uint32_t address) {
  return kTileBytes / 16 << 16 | (address & 0x3ffff) >> 4;
}
// The same so many bytes further.
__device__ inline uint32_t further(uint32_t tile, uint32_t bytes) { return tile + bytes / 16; }

// Before the first product on registers that were written since; after the last of a group; until at most kPending
// of the groups are unfinished.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d += a b with 64 rows and 16 of K. Lane l of warp w has, with g = l / 4 and t = l % 4:
// d[4 j] .. d[4 j + 3] at (16 w + g, 8 j + 2 t), (.., + 1), (16 w + g + 8, 8 j + 2 t), (.., + 1); a in registers as
// multiply_add() has it, of rows 16 w on.

// The one way to write a product: d's names and operands, what the instruction is given besides d, and its inputs.
// The predicate p says whether it adds.
#define KDT_NAMES_32                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KDT_NAMES_128                                                                            \
  KDT_NAMES_32                                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"             \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"             \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define KDT_8_OF(how, d, i) \
  how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3]), how(d[i + 4]), how(d[i + 5]), how(d[i + 6]), how(d[i + 7])
#define KDT_32_OF(how, d, i) \
  KDT_8_OF(how, d, i), KDT_8_OF(how, d, i + 8), KDT_8_OF(how, d, i + 16), KDT_8_OF(how, d, i + 24)
#define KDT_128_OF(how, d) KDT_32_OF(how, d, 0), KDT_32_OF(how, d, 32), KDT_32_OF(how, d, 64), KDT_32_OF(how, d, 96)
#define KDT_PRODUCT(columns, names, operands, prepare, given, ...)                                                 \
  if constexpr (__is_same(T, __nv_bfloat16)) {                                                                     \
    asm volatile("{\n" prepare "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" names "}, " given \
                 ";\n}"                                                                                            \
                 : operands                                                                                        \
                 : __VA_ARGS__);                                                                                   \
  } else {                                                                                                         \
    asm volatile("{\n" prepare "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.f16.f16 {" names "}, " given   \
                 ";\n}"                                                                                            \
                 : operands                                                                                        \
                 : __VA_ARGS__);                                                                                   \
  }
// a and b are operands `a` and `b`, the high half of tiles `high`, whether it adds `adds`.
#define KDT_BOTH_TILES(a, b, high, adds)                                                                           \
  ".reg .pred p;\n.reg .b64 ta, tb;\nsetp.ne.b32 p, " adds ", 0;\nmov.b64 ta, {" a ", " high "};\nmov.b64 tb, {" b \
  ", " high "};\n"
#define KDT_ONE_TILE(b, high, adds) \
  ".reg .pred p;\n.reg .b64 tb;\nsetp.ne.b32 p, " adds ", 0;\nmov.b64 tb, {" b ", " high "};\n"

// 64 columns; a and b by rows. This one sets d = a b, ...
template <class T>
__device__ __forceinline__ void multiply_64(float (&d)[32], uint32_t a, uint32_t b) {
  KDT_PRODUCT("64", KDT_NAMES_32, KDT_32_OF("=f", d, 0), KDT_BOTH_TILES("%32", "%33", "%35", "%34"),
              "ta, tb, p, 1, 1, 0, 0", "r"(a), "r"(b), "n"(0), "n"(kTileHigh))
}
// ... this one adds.
template <class T>
__device__ __forceinline__ void multiply_add_64(float (&d)[32], uint32_t a, uint32_t b) {
  KDT_PRODUCT("64", KDT_NAMES_32, KDT_32_OF("+f", d, 0), KDT_BOTH_TILES("%32", "%33", "%35", "%34"),
              "ta, tb, p, 1, 1, 0, 0", "r"(a), "r"(b), "n"(1), "n"(kTileHigh))
}
// The same with a in registers.
template <class T>
__device__ __forceinline__ void multiply_add_64(float (&d)[32], const uint32_t (&a)[4], uint32_t b) {
  KDT_PRODUCT("64", KDT_NAMES_32, KDT_32_OF("+f", d, 0), KDT_ONE_TILE("%36", "%38", "%37"),
              "{%32, %33, %34, %35}, tb, p, 1, 1, 0", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(1),
              "n"(kTileHigh))
}
// 256 columns; a by rows, b by columns.
template <class T>
__device__ __forceinline__ void multiply_add_256(float (&d)[128], uint32_t a, uint32_t b) {
  KDT_PRODUCT("256", KDT_NAMES_128, KDT_128_OF("+f", d), KDT_BOTH_TILES("%128", "%129", "%131", "%130"),
              "ta, tb, p, 1, 1, 0, 1", "r"(a), "r"(b), "n"(1), "n"(kTileHigh))
}
// The same with a in registers.
template <class T>
__device__ __forceinline__ void multiply_add_256(float (&d)[128], const uint32_t (&a)[4], uint32_t b){
    KDT_PRODUCT("256", KDT_NAMES_128, KDT_128_OF("+f", d), KDT_ONE_TILE("%132", "%134", "%133"),
                "{%128, %129, %130, %131}, tb, p, 1, 1, 1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b),
                "n"(1), "n"(kTileHigh))}
#undef KDT_NAMES_32
#undef KDT_NAMES_128
#undef KDT_8_OF
#undef KDT_32_OF
#undef KDT_128_OF
#undef KDT_PRODUCT
#undef KDT_BOTH_TILES
#undef KDT_ONE_TILE

// Ordinary writes to shared memory before this are seen by products and copies that begin after the next barrier.
__device__ inline void fence_for_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Registers a thread of this warpgroup has from here on.
template <int kCount>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Four 8x8 matrices of 16-bit values to shared memory, as load_matrices() reads them.
__device__ inline void store_matrices(uint32_t address, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// ---- barriers and copies -----------------------------------------------------------------------------

__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives; the phase ends when so many bytes have been copied, too.
__device__ inline void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Makes initialized barriers known to copies.
__device__ inline void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Gets the description of a tensor ahead of the first copy.
__device__ inline void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Of the L2 cache: what is read once goes first.
__device__ inline uint64_t policy_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies a box, by its first column, row and page; what lies outside of the tensor becomes zeros.
__device__ inline void copy_box(uint32_t target, const CUtensorMap& map, uint32_t barrier, int32_t column,
                                int32_t row, int32_t page) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(page), "r"(barrier)
      : "memory");
}
__device__ inline void copy_box(uint32_t target, const CUtensorMap& map, uint32_t barrier, int32_t column,
                                int32_t row, int32_t page, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(page), "r"(barrier), "l"(policy)
      : "memory");
}
// The same of a tensor of four dimensions, without a policy.
__device__ inline void copy_box(uint32_t target, const CUtensorMap& map, uint32_t barrier, int32_t column,
                                int32_t row, int32_t line, int32_t page) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(line), "r"(page), "r"(barrier)
      : "memory");
}

// Arrives at a barrier of the block's kThreads threads without waiting; sync_part() waits.
template <int kThreads>
__device__ inline void arrive_part(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace kdt::cuda
