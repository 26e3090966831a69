/*
 * kdtree-engine: native kernels for DDTree speculative decoding on MLA models.
 *
 * This is the whole C ABI of libkdtree_kernels.so (the KDTR container has its own header, kdtr.h).
 * It is C11 and needs no CUDA header. Read it from top to bottom:
 *
 *   1. versions, build facts, limits   5. operations on trees
 *   2. status codes and error text     6. the KV cache
 *   3. contexts and devices            7. operations on vocabulary rows
 *   4. the draft tree and its layout   8. attention
 *
 * Letters used in shapes:
 *   B requests in the batch      D draft depth              K candidates a row
 *   V vocabulary                 N node slots, root included (budget + 1)
 *   W ceil(N / 64)               M tokens an accepted path may hold
 *   R rows of logits             Q queries a request        H query heads on this rank
 *
 * Rules that hold for every operation:
 *   - Arrays are row-major. [B, D, K] beside a pointer is its shape. Strides count ELEMENTS, and 0 means
 *     packed. The last dimension is always contiguous, and so is every one-dimensional array.
 *   - Pointers are aligned to their element type. On the CPU backend all memory is host memory; on the
 *     CUDA backend all arrays are memory of the context's device, managed memory included (the parameter structs
 *     themselves are always host memory); memory of the host or of another device is INVALID_ARGUMENT.
 *   - The byte range an output spans (first to last element, strides included) must not overlap any other
 *     array of the call, unless the operation says otherwise.
 *   - Every optional pointer says so; every other pointer is required, except that arrays without elements
 *     (B = 0, say) may be NULL. B = 0 is a no-op.
 *   - Parameter structs start with struct_size = sizeof(the struct) and must otherwise be zero-initialised:
 *         kdt_tree_build_params p = {.struct_size = sizeof p};
 *     A larger struct (a newer header, up to 4096 bytes) is accepted when its unknown bytes are zero. Fields marked
 *     "reserved" are refused with KDT_ERR_UNSUPPORTED when set.
 *   - Scratch memory is the caller's: kdt_X_workspace_size gives the bytes kdt_X needs for the same context
 *     and the same scalars in its params (pointers to arrays are not read). The size never shrinks when a
 *     dimension grows. Any alignment will do; the workspace must not overlap any array of the call.
 *   - Every operation may return NULL_POINTER, SHAPE, LIMIT, STRIDE, ALIGNMENT, OVERLAP, WORKSPACE, STRUCT,
 *     INVALID_ARGUMENT, UNSUPPORTED and OUT_OF_MEMORY (KDT_ERR_*), and on the CUDA backend CUDA.
 *   - A call that returns an error has written nothing (KDT_ERR_CUDA excepted). Bad numbers INSIDE device or host
 *     arrays are no error: they set flags in `status` (KDT_STATUS_*), for that request alone.
 *   - num_live, optional, is a single int32 in the same memory as the arrays: requests >= num_live are dead
 *     and get padding (see each operation). It is clamped to 0..B without a flag.
 *   - `stream` is a cudaStream_t of the context's device on the CUDA backend (NULL: its default stream) and must
 *     be NULL on the CPU backend, where a call has finished when it returns. On the CUDA backend a call puts its
 *     work on the stream and returns: it does not allocate, synchronise or read an array, keeps the caller's
 *     current device, and may be captured in a graph and replayed after numbers in device memory changed
 *     (num_live, lengths, budgets, counts, contents). A failing launch is an error of the call that made it; its
 *     outputs are then undefined.
 *   - The same inputs give the same bits on every run, with any number of threads, in the floating-point
 *     environment a thread starts with (rounding to nearest, denormals on). All functions may be
 *     called from many threads at once, with one context too. No function throws, aborts or exits.
 */
#ifndef KDTREE_KDTREE_H
#define KDTREE_KDTREE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KDT_API __attribute__((visibility("default")))
#else
#define KDT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Versions and build facts ------------------------------------------------------------------- */

/* The release, and apart from it the ABI: the major number changes when a program built against an older
 * header would break, the minor number when something was added. */
#define KDT_VERSION "0.1.0"
#define KDT_ABI_MAJOR 1
#define KDT_ABI_MINOR 0

/* KDT_ABI_MAJOR * 1000 + KDT_ABI_MINOR of the loaded library. Compare the major part before any other call. */
KDT_API int32_t kdt_abi_version(void);

/* The release as text, "0.1.0". Static storage. */
KDT_API const char* kdt_version(void);

/* One JSON object: version, abi, compiler, build_type, cuda (bool), cuda_architectures. Static storage. */
KDT_API const char* kdt_build_info(void);

/* Largest values the operations accept; beyond them a call fails with KDT_ERR_LIMIT and names the limit. */
#define KDT_MAX_BUDGET 1024     /* nodes without the root; so N <= 1025 */
#define KDT_MAX_DEPTH 64        /* D */
#define KDT_MAX_CANDIDATES 1024 /* K */
#define KDT_MAX_SHARDS 256      /* S, of topk_merge */

/* Types of logits, queries, caches. float16 and bfloat16 are 16-bit words in host byte order. The numbers are
 * those of the KDTR format. */
enum { KDT_F32 = 2, KDT_F16 = 3, KDT_BF16 = 4 };

/* ---- 2. Status codes and error text ---------------------------------------------------------------- */

/* Returned by every function with an int32_t result. 0 is success; the hundreds are groups. */
enum {
  KDT_OK = 0,

  /* 1xx: the caller's mistake, found before anything was written. */
  KDT_ERR_INVALID_ARGUMENT = 100, /* a value that is out of its range or contradicts another */
  KDT_ERR_NULL_POINTER = 101,     /* a required pointer is NULL */
  KDT_ERR_SHAPE = 102,            /* a dimension is negative or does not match another */
  KDT_ERR_LIMIT = 103,            /* a documented limit is exceeded */
  KDT_ERR_STRIDE = 104,           /* a stride is negative, too small or overflows the address range */
  KDT_ERR_ALIGNMENT = 105,        /* a pointer is not aligned to its element type */
  KDT_ERR_OVERLAP = 106,          /* an output overlaps another array */
  KDT_ERR_WORKSPACE = 107,        /* the workspace is missing or too small */
  KDT_ERR_STRUCT = 108,           /* struct_size is unknown, or unknown trailing bytes are not zero */

  /* 2xx: not to be had from this library or on this machine. */
  KDT_ERR_UNSUPPORTED = 200, /* a reserved field is set, or the backend lacks the operation */
  KDT_ERR_NO_BACKEND = 201,  /* the library was built without that backend */
  KDT_ERR_NO_DEVICE = 202,   /* no usable driver or device */

  /* 3xx: the machine failed us. */
  KDT_ERR_OUT_OF_MEMORY = 300,
  KDT_ERR_CUDA = 301, /* a CUDA call or launch failed; the text has CUDA's own */

  /* 4xx: our mistake; please report it. */
  KDT_ERR_INTERNAL = 400

  /* 5xx: KDTR files, see kdtr.h. */
};

/* "KDT_ERR_SHAPE" and so on; "unknown status" for a number that is none. Static storage, never NULL. */
KDT_API const char* kdt_status_name(int32_t status);

/* Why the last failing call of THIS thread failed: function, argument, what was expected and what came.
 * "" when nothing failed yet. Valid until the next failing call of this thread; never NULL. */
KDT_API const char* kdt_last_error(void);

/* Per-request flags in the `status` arrays of the operations: 0 or a sum. */
enum {
  KDT_STATUS_ROW_INVALID = 1,   /* NaN, +inf or nothing finite in a row of logits */
  KDT_STATUS_ROW_TRUNCATED = 2, /* a row of candidates ended early */
  KDT_STATUS_BAD_TREE = 4,      /* malformed parents, mask, links or path */
  KDT_STATUS_CLAMPED = 8,       /* a number in an array was out of range and was clamped */
  KDT_STATUS_BAD_TARGET = 16    /* a target token < 0 */
};

/* ---- 3. Contexts and devices ----------------------------------------------------------------------- */

enum { KDT_BACKEND_CPU = 0, KDT_BACKEND_CUDA = 1 };

/* Where and how operations run. Immutable once created. */
typedef struct kdt_context kdt_context;

typedef struct kdt_context_params {
  size_t struct_size;
  int32_t backend;     /* KDT_BACKEND_* */
  int32_t device;      /* CUDA device ordinal; 0 on the CPU backend */
  int32_t num_threads; /* CPU threads a call may use, 0..1024; 0: as many as this process may run on */
  int32_t reserved0;   /* reserved */
} kdt_context_params;

/* Creates *context. params may be NULL: the CPU backend with default threads. On an error *context is NULL.
 * The environment variable KDTREE_VERIFY_ATTN, read here, says which of its kernels verify_attn takes on CUDA: auto
 * (the default), plain (float32 arithmetic), mma (tensor cores; calls that it cannot take go to plain), wgmma (as
 * Hopper has them; calls that it cannot take, and other chips, go to mma). KDTREE_CPU_ISA, read here, too, says
 * which instructions the CPU backend's hot loops use: auto (the default: the widest that the processor has),
 * scalar, avx2 (with FMA and F16C), avx512 (F, BW, DQ, VL); a set that the processor lacks is INVALID_ARGUMENT. So
 * far verify_attn alone has such loops; its results differ between sets in their last bits.
 *
 * Errors: INVALID_ARGUMENT, NULL_POINTER, STRUCT, UNSUPPORTED, NO_BACKEND, NO_DEVICE, CUDA, OUT_OF_MEMORY. */
KDT_API int32_t kdt_context_create(const kdt_context_params* params, kdt_context** context);

/* Frees a context that no call is using any more. NULL is allowed. */
KDT_API void kdt_context_destroy(kdt_context* context);

/* What kdt_context_create settled on: num_threads is never 0 here on the CPU backend. params->struct_size must be
 * set. Errors: NULL_POINTER, ALIGNMENT, STRUCT. */
KDT_API int32_t kdt_context_get(const kdt_context* context, kdt_context_params* params);

/* Number of devices of a backend (the CPU backend has one). *count is 0 on an error.
 * Errors: INVALID_ARGUMENT, NO_BACKEND (built without it), NO_DEVICE (no driver, no GPU), CUDA. */
KDT_API int32_t kdt_device_count(int32_t backend, int32_t* count);

typedef struct kdt_device_info {
  size_t struct_size;              /* in: sizeof(kdt_device_info) */
  char name[256];                  /* NUL-terminated; CPU: with the instruction set that calls use, as "(avx512)" */
  int64_t memory_bytes;            /* device memory; 0 on the CPU backend */
  int32_t compute_capability;      /* CUDA: major * 10 + minor, 90 for an H200; CPU: 0 */
  int32_t kernel_architecture;     /* CUDA: architecture the loaded kernels were compiled for, 90 for 90a code,
                                      80 when the driver compiled the portable PTX; CPU: 0 */
  int32_t multiprocessors;         /* CUDA: SMs; CPU: hardware threads this process may run on */
  int32_t max_shared_memory_bytes; /* CUDA: opt-in limit a block; CPU: 0 */
} kdt_device_info;

/* Fills *info for one device. On CUDA it runs one tiny kernel there, so success proves that the library's
 * device code loads. Not for hot loops: it allocates and synchronises. The caller's current device is kept.
 * Errors: as kdt_device_count, and INVALID_ARGUMENT for a device that does not exist (on the CPU for
 * KDTREE_CPU_ISA, as kdt_context_create), STRUCT. */
KDT_API int32_t kdt_device_query(int32_t backend, int32_t device, kdt_device_info* info);

/* ---- 4. The draft tree ----------------------------------------------------------------------------- */

/*
 * B trees of at most N slots each, one after another. Slot 0 is the ROOT: the last token already emitted,
 * whose KV row is not in the cache yet. Slots 1.. are nodes in emission order (best first), so parents come
 * before children, and the first b+1 slots are the tree of budget b. Slots at and beyond node_count hold
 * the padding given below. Token id 0 is an ordinary token.
 *
 * Operations that return a tree write every array; operations that take one say which they read. A caller
 * who fills a tree by hand may use any sibling order: tree_accept follows the links as given.
 */
typedef struct kdt_tree {
  size_t struct_size;
  int32_t batch_size;        /* B >= 0 */
  int32_t num_slots;         /* N, 1..1025 */
  int64_t slot_stride;       /* from request to request in each [B, N] array, >= N */
  int64_t visibility_stride; /* from request to request in visibility, >= N * visibility_pitch */
  int64_t visibility_pitch;  /* from row to row in visibility, >= W */
  int32_t* tokens;           /* [B, N]; padding -1 */
  int32_t* parents;          /* [B, N] slots; the root's and padding -1 */
  int32_t* first_child;      /* [B, N] slots; none and padding -1 */
  int32_t* next_sibling;     /* [B, N] slots, ascending; none and padding -1 */
  int32_t* depths;           /* [B, N]; root and padding 0 */
  int32_t* positions;        /* [B, N]; prefix_len + depth, so siblings share one; padding 0 */
  float* log_probs;          /* [B, N]; path sum, root 0; padding -inf */
  uint64_t* visibility;      /* [B, N, W]; bit j of row i (bit 0 = LSB of word 0) is set when j is i or an
                                ancestor of i; padding rows 0 */
  int32_t* node_count;       /* [B]; root included; 0 for a dead request */
  int32_t* status;           /* [B], optional; sum of KDT_STATUS_* */
} kdt_tree;

/* ---- 5. Operations on trees ------------------------------------------------------------------------ */

/*
 * tree_build: the best `budget`-node tree from D rows of K candidates (DDTree, arXiv 2604.12989).
 *
 * A node is a tuple of ranks (r1..rd); its score is the float64 sum, from +0.0 in depth order, of its path's
 * float32 log-probs. The tree is the first `budget` nodes in the order (score descending; then rank tuples
 * lexicographically, a proper prefix first). log_probs is the score rounded to float32.
 *
 * A row ends at its first entry that is NaN, infinite, > 0, larger than the entry before it, or whose token
 * id is < 0 or >= vocab_size (when given). An empty row ends the tree at its depth. Candidates keep the
 * caller's order; equal ids are kept.
 *
 * status: ROW_TRUNCATED when a row d < max_depth ended before K, unless all that is left of it is padding,
 * that is (-inf, -1); CLAMPED when budgets[b], max_depths[b] or prefix_lens[b] was out of range.
 * Dead requests: padding, node_count 0, status 0.
 */
typedef struct kdt_tree_build_params {
  size_t struct_size;
  int32_t depth;                /* D, 0..64; 0: only roots */
  int32_t num_candidates;       /* K, 0..1024 */
  int32_t budget;               /* 0..1024; tree->num_slots must be budget + 1 */
  int32_t vocab_size;           /* 0: unknown, ids are only checked for < 0 */
  const float* log_probs;       /* [B, D, K] natural log */
  int64_t log_probs_stride;     /* from request to request, >= D * log_probs_row_stride */
  int64_t log_probs_row_stride; /* from row to row, >= K */
  const int32_t* token_ids;     /* [B, D, K] */
  int64_t token_ids_stride;     /* as for log_probs */
  int64_t token_ids_row_stride;
  const int32_t* root_tokens; /* [B] */
  const int32_t* prefix_lens; /* [B] tokens in the KV cache, clamped to 0..2^31-1-D */
  const int32_t* budgets;     /* [B], optional; clamped to 0..budget */
  const int32_t* max_depths;  /* [B], optional; clamped to 0..D */
  const int32_t* num_live;    /* [1], optional */
  const kdt_tree* tree;       /* out */
  int32_t spine_len;          /* reserved */
  int32_t reserved0;          /* reserved */
  const float* min_scores;    /* reserved: [B] nodes below it are left out */
  const float* depth_costs;   /* reserved: [D] cost-aware stop */
} kdt_tree_build_params;

KDT_API int32_t kdt_tree_build_workspace_size(const kdt_context* context, const kdt_tree_build_params* params,
                                              size_t* size);
KDT_API int32_t kdt_tree_build(const kdt_context* context, const kdt_tree_build_params* params, void* workspace,
                               size_t workspace_size, void* stream);

/*
 * tree_from_parents: the same layout for trees of other drafters (EAGLE, Medusa, n-gram), of any depth < N.
 * Parents must come before their children: parents[0] = -1 and 0 <= parents[i] < i. log_probs are 0.
 *
 * status: BAD_TREE (then the tree is its root alone) when parents are malformed or node_counts[b] is outside
 * 0..N; CLAMPED when prefix_lens[b] was outside 0..2^31-1-N. A request with node_counts[b] = 0 is treated as
 * dead. Dead requests: padding, node_count 0, status 0.
 */
typedef struct kdt_tree_from_parents_params {
  size_t struct_size;
  const int32_t* tokens;      /* [B, N] */
  int64_t tokens_stride;      /* from request to request, >= N */
  const int32_t* parents;     /* [B, N] slots */
  int64_t parents_stride;     /* from request to request, >= N */
  const int32_t* node_counts; /* [B] root included */
  const int32_t* prefix_lens; /* [B] */
  const int32_t* num_live;    /* [1], optional */
  const kdt_tree* tree;       /* out */
} kdt_tree_from_parents_params;

KDT_API int32_t kdt_tree_from_parents_workspace_size(const kdt_context* context,
                                                     const kdt_tree_from_parents_params* params, size_t* size);
KDT_API int32_t kdt_tree_from_parents(const kdt_context* context, const kdt_tree_from_parents_params* params,
                                      void* workspace, size_t workspace_size, void* stream);

/*
 * tree_from_visibility: the same, from a boolean ancestor mask: mask[i][j] != 0 when slot j is i or an
 * ancestor of i. Rows and columns >= node_counts[b] are ignored. The mask must be an ancestor closure over
 * slots where parents come first (true diagonal, nothing above it, and row i is its parent's row plus i, the
 * parent being its highest j < i); otherwise BAD_TREE and the root alone.
 * Everything else as for tree_from_parents.
 */
typedef struct kdt_tree_from_visibility_params {
  size_t struct_size;
  const uint8_t* mask;        /* [B, N, N], one byte an entry */
  int64_t mask_stride;        /* from request to request, >= N * mask_row_stride */
  int64_t mask_row_stride;    /* from row to row, >= N */
  const int32_t* tokens;      /* [B, N] */
  int64_t tokens_stride;      /* from request to request, >= N */
  const int32_t* node_counts; /* [B] root included */
  const int32_t* prefix_lens; /* [B] */
  const int32_t* num_live;    /* [1], optional */
  const kdt_tree* tree;       /* out */
} kdt_tree_from_visibility_params;

KDT_API int32_t kdt_tree_from_visibility_workspace_size(const kdt_context* context,
                                                        const kdt_tree_from_visibility_params* params,
                                                        size_t* size);
KDT_API int32_t kdt_tree_from_visibility(const kdt_context* context, const kdt_tree_from_visibility_params* params,
                                         void* workspace, size_t workspace_size, void* stream);

/*
 * tree_accept: the longest path from the root that agrees with the target.
 *
 * target_tokens[b][i] is the target's token after slot i. From the root on: find the first child in link
 * order whose token is the target's token after the current slot; emit the target's token; go on from that
 * child. The token emitted where no child matches is the bonus, and the last. The walk also ends, in this
 * order of precedence, with a stop token (emitted; finished 1; the root's token is not tested), when
 * max_tokens[b] tokens are out (finished 2; at once when max_tokens[b] <= 0), when M tokens are out
 * (finished 0), and at a target token < 0, which is not emitted (finished 0).
 *
 * Always: accept_len = token_count; accept_index = the root and the first token_count - 1 accepted slots,
 * that is, the slots whose KV rows are to be kept (see kv_compact); next_root = the last emitted token (the
 * root's token when none was), whose KV row is not in the cache: the next step's root.
 *
 * The children of slot p are first_child[p], then next_sibling of that, and so on until -1. A link must lie
 * above p and below node_count, and at most N links are followed in the whole walk: at another link the
 * list counts as ended, and BAD_TREE is set; the bonus still comes. The list of a slot is searched before
 * its token is emitted, so this flag does not depend on stop_tokens or max_tokens for the slots visited.
 *
 * status: BAD_TREE; BAD_TARGET (a target token < 0 was met); CLAMPED when node_count was outside 0..N.
 * Dead requests, and those whose node_count is (clamped to) 0: tokens, accept_index, next_root -1, all else 0, but
 * for the flag CLAMPED.
 * Reads of the tree: tokens, first_child, next_sibling, node_count; its other arrays may be NULL.
 */
typedef struct kdt_tree_accept_params {
  size_t struct_size;
  const kdt_tree* tree;          /* in */
  const int32_t* target_tokens;  /* [B, N] */
  int64_t target_tokens_stride;  /* from request to request, >= N */
  const int32_t* max_tokens;     /* [B], optional */
  const int32_t* stop_tokens;    /* [num_stop_tokens], for all requests; optional */
  int32_t num_stop_tokens;       /* >= 0 */
  int32_t max_len;               /* M >= 1 */
  const int32_t* num_live;       /* [1], optional */
  int32_t* tokens;               /* out [B, M]; padding -1 */
  int64_t tokens_stride;         /* from request to request, >= M */
  int32_t* accept_index;         /* out [B, M] slots; padding -1 */
  int64_t accept_index_stride;   /* from request to request, >= M */
  int32_t* token_count;          /* out [B] */
  int32_t* accept_len;           /* out [B] */
  int32_t* next_root;            /* out [B] */
  int32_t* finished;             /* out [B] 0, 1 stop token, 2 max_tokens */
  int32_t* status;               /* out [B], optional */
  const float* target_log_probs; /* reserved: [B, N] */
  float* log_probs;              /* reserved: out [B, M] */
} kdt_tree_accept_params;

KDT_API int32_t kdt_tree_accept_workspace_size(const kdt_context* context, const kdt_tree_accept_params* params,
                                               size_t* size);
KDT_API int32_t kdt_tree_accept(const kdt_context* context, const kdt_tree_accept_params* params, void* workspace,
                                size_t workspace_size, void* stream);

/* ---- 6. The KV cache ------------------------------------------------------------------------------- */

/*
 * One cache of L layers, paged or contiguous. With a block_table, logical row r of request b is row
 * r % page_size of page block_table[b][r / page_size]; without one the cache is [B, S, w], page_size is S,
 * num_pages is at least B, and page b is request b's.
 * Layers are either one allocation (data and layer_stride) or an array of L pointers (layer_data) to memory that
 * does not interleave. Rows, pages and layers may be nested in any order ([pages, L, page_size, w], say); no two
 * may share an element. kv_compact moves bytes and asks for no alignment; attention asks for that of the elements.
 */
typedef struct kdt_kv_cache {
  size_t struct_size;
  void* data;                 /* [L, num_pages, page_size, w]; NULL when layer_data is given */
  void* const* layer_data;    /* [L] pointers to [num_pages, page_size, w], in the memory of the arrays */
  int32_t num_layers;         /* L >= 1 */
  int32_t num_pages;          /* >= 0 */
  int32_t page_size;          /* rows a page, >= 1 (contiguous: S, >= 0) */
  int32_t row_width;          /* w elements, >= 1 */
  int32_t element_size;       /* bytes an element, 1..64 */
  int32_t max_pages;          /* columns of block_table */
  int64_t layer_stride;       /* elements; 0: num_pages * page_stride; ignored with layer_data */
  int64_t page_stride;        /* elements; 0: page_size * row_stride */
  int64_t row_stride;         /* elements, >= w; 0: w */
  const int32_t* block_table; /* [B, max_pages] page ids, or NULL: contiguous */
  int64_t block_table_stride; /* from request to request, >= max_pages */
} kdt_kv_cache;

/*
 * kv_compact: keeps the KV rows of the accepted path. For k < accept_len[b], in every layer, the row at slot
 * accept_index[b][k] (logical row prefix_lens[b] + slot) is copied to logical row prefix_lens[b] + k of the
 * destination. In place (destination NULL) rows already there are not written, and overlapping moves are
 * safe. A destination of its own gets all accepted rows, and must not overlap the cache; it has the cache's
 * num_layers, row_width and element_size and may differ in all else.
 *
 * accept_index[b] must ascend strictly within 0..N-1, accept_len[b] lie in 0..M, and every row, at both
 * ends, lie in the table (logical row within max_pages, page id within num_pages) or in the contiguous
 * request; otherwise that request is untouched and flagged BAD_TREE. Dead requests are untouched, status 0.
 * The pages of the rows written must belong to that request alone.
 */
typedef struct kdt_kv_compact_params {
  size_t struct_size;
  int32_t batch_size;              /* B >= 0 */
  int32_t num_slots;               /* N, 1..1025 */
  int32_t max_len;                 /* M >= 1 */
  int32_t reserved0;               /* reserved */
  const kdt_kv_cache* cache;       /* in; and out unless destination is given */
  const kdt_kv_cache* destination; /* out, optional */
  const int32_t* accept_index;     /* [B, M] slots */
  int64_t accept_index_stride;     /* from request to request, >= M */
  const int32_t* accept_len;       /* [B] */
  const int32_t* prefix_lens;      /* [B] */
  const int32_t* num_live;         /* [1], optional */
  int32_t* status;                 /* out [B], optional */
} kdt_kv_compact_params;

KDT_API int32_t kdt_kv_compact_workspace_size(const kdt_context* context, const kdt_kv_compact_params* params,
                                              size_t* size);
KDT_API int32_t kdt_kv_compact(const kdt_context* context, const kdt_kv_compact_params* params, void* workspace,
                               size_t workspace_size, void* stream);

/* ---- 7. Operations on vocabulary rows -------------------------------------------------------------- */

/*
 * Rows of logits come as [R, V], one row after another. R is B, B*D or B*N rows; rows_per_request says how
 * many belong to a request, so that one num_live serves them all: row r is dead when
 * r / rows_per_request >= num_live. V is any number below 2^31; offsets are 64-bit.
 * A vocabulary may be split over ranks: id_offset is added to every id (id_offset + V <= 2^31).
 */

/*
 * topk_logprobs: the K most likely tokens of each row and their log-probs.
 *
 * Tokens are ordered by logit descending, equal logits (+0 = -0) by id ascending; a -inf logit is an ordinary
 * one. lse = log(sum(exp(logit))) over the whole row; log_prob = min(0, float32(logit) - float32(lse)), one
 * float32 subtraction. K > V: the rest is padding, (-inf, -1).
 *
 * A row with a NaN or +inf, or without any finite logit, is ROW_INVALID: all (-inf, -1).
 *
 * Raw form, for one shard of a vocabulary (to be joined by topk_merge): log_probs receives the logits as
 * float32, and lse the shard's own lse in float64. A shard that is all -inf, or empty, is legal there, with
 * lse -inf; a row with a NaN or +inf is ROW_INVALID, all (-inf, -1), with lse NaN.
 *
 * Dead rows: padding, lse -inf, status 0.
 */
typedef struct kdt_topk_logprobs_params {
  size_t struct_size;
  int32_t num_rows;         /* R >= 0 */
  int32_t vocab_size;       /* V >= 0 */
  int32_t num_candidates;   /* K, 0..1024 */
  int32_t logits_dtype;     /* KDT_F32, KDT_F16 or KDT_BF16 */
  const void* logits;       /* [R, V] */
  int64_t logits_stride;    /* from row to row, >= V */
  int32_t raw;              /* 0, or 1 for the raw form */
  int32_t id_offset;        /* added to every id, >= 0 */
  float* log_probs;         /* out [R, K] */
  int64_t log_probs_stride; /* from row to row, >= K */
  int32_t* token_ids;       /* out [R, K] */
  int64_t token_ids_stride; /* from row to row, >= K */
  double* lse;              /* out [R], natural log; optional unless raw */
  const int32_t* num_live;  /* [1], optional */
  int32_t rows_per_request; /* >= 1, a divisor of R; 0: 1 */
  int32_t reserved0;        /* reserved */
  int32_t* status;          /* out [R], optional */
  const uint32_t* allowed;  /* reserved: [R, ceil(V / 32)] bitmask of allowed tokens */
} kdt_topk_logprobs_params;

KDT_API int32_t kdt_topk_logprobs_workspace_size(const kdt_context* context, const kdt_topk_logprobs_params* params,
                                                 size_t* size);
KDT_API int32_t kdt_topk_logprobs(const kdt_context* context, const kdt_topk_logprobs_params* params,
                                  void* workspace, size_t workspace_size, void* stream);

/*
 * topk_merge: joins the raw top-k of S shards of a vocabulary into the top-k log-probs of the whole.
 *
 * Entries are ordered by (logit descending, id ascending), padding (id < 0) last; of entries with the same id
 * the first counts, in (shard, place) order. The shards' lse are added up in float64; then as in
 * topk_logprobs. token_ids are exactly those of one shard over the whole vocabulary, log_probs within
 * 2e-6 + 1e-6 |log_prob| + 1.2e-7 |lse|.
 *
 * ROW_INVALID, all (-inf, -1): some lse is NaN or +inf, or all are -inf, or the logit of an entry is NaN or +inf.
 * Dead rows: padding, lse -inf, status 0.
 */
typedef struct kdt_topk_merge_params {
  size_t struct_size;
  int32_t num_shards;             /* S, 1..256 */
  int32_t num_rows;               /* R >= 0 */
  int32_t num_candidates;         /* K, 0..1024, of each shard and of the result */
  int32_t rows_per_request;       /* >= 1, a divisor of R; 0: 1 */
  const float* logits;            /* [S, R, K] */
  int64_t logits_stride;          /* from shard to shard, >= R * logits_row_stride */
  int64_t logits_row_stride;      /* from row to row, >= K */
  const int32_t* shard_token_ids; /* [S, R, K], with the shards' id_offset added */
  int64_t shard_token_ids_stride; /* as for logits */
  int64_t shard_token_ids_row_stride;
  const double* shard_lse;  /* [S, R] */
  int64_t shard_lse_stride; /* from shard to shard, >= R */
  float* log_probs;         /* out [R, K] */
  int64_t log_probs_stride; /* from row to row, >= K */
  int32_t* token_ids;       /* out [R, K] */
  int64_t token_ids_stride; /* from row to row, >= K */
  double* lse;              /* out [R], optional */
  const int32_t* num_live;  /* [1], optional */
  int32_t* status;          /* out [R], optional */
} kdt_topk_merge_params;

KDT_API int32_t kdt_topk_merge_workspace_size(const kdt_context* context, const kdt_topk_merge_params* params,
                                              size_t* size);
KDT_API int32_t kdt_topk_merge(const kdt_context* context, const kdt_topk_merge_params* params, void* workspace,
                               size_t workspace_size, void* stream);

/*
 * argmax: the most likely token of each row; of equal logits (+0 = -0) the lowest id.
 *
 * values, for joining shards: the largest logit; NaN when the row has a NaN, -inf when it has no logit.
 * A row with a NaN, or without any finite logit (+inf is none), is ROW_INVALID: token -1. So the shards of a row
 * with a +inf cannot be joined. Dead rows: token -1, value -inf, status 0.
 */
typedef struct kdt_argmax_params {
  size_t struct_size;
  int32_t num_rows;         /* R >= 0 */
  int32_t vocab_size;       /* V >= 0 */
  int32_t logits_dtype;     /* KDT_F32, KDT_F16 or KDT_BF16 */
  int32_t id_offset;        /* added to every id, >= 0 */
  const void* logits;       /* [R, V] */
  int64_t logits_stride;    /* from row to row, >= V */
  int32_t* tokens;          /* out [R] */
  float* values;            /* out [R], optional */
  const int32_t* num_live;  /* [1], optional */
  int32_t rows_per_request; /* >= 1, a divisor of R; 0: 1 */
  int32_t reserved0;        /* reserved */
  int32_t* status;          /* out [R], optional */
  const uint32_t* allowed;  /* reserved: [R, ceil(V / 32)] bitmask of allowed tokens */
} kdt_argmax_params;

KDT_API int32_t kdt_argmax_workspace_size(const kdt_context* context, const kdt_argmax_params* params,
                                          size_t* size);
KDT_API int32_t kdt_argmax(const kdt_context* context, const kdt_argmax_params* params, void* workspace,
                           size_t workspace_size, void* stream);

/*
 * sample: one token of each row from softmax(logits / temperature), by the Gumbel-max trick.
 *
 * token = the id of the largest score, the lowest of equal ones; score = logit / temperature + g, as if in
 * float64. The noise g of a token depends on (seed, request id, position, token id) alone, so a result depends on
 * neither batch nor slot, and the samples at the nodes of a tree equal those of a chain at the same positions.
 * To the bit, with id the global id (id_offset added) and Philox4x32-10 (Salmon et al., 2011):
 *     key     = (seed & 0xffffffff, seed >> 32)
 *     counter = (id / 4, position, request_id & 0xffffffff, request_id >> 32), each as uint32
 *     x       = word id % 4 of philox(counter, key)
 *     g       = -log(-log((x + 0.5) / 2^32))
 * Implementations may differ only where the two best scores are within 1e-5 * max(1, max|logit| / temperature).
 *
 * A temperature that is negative or NaN, a NaN logit, or no finite logit: ROW_INVALID, token -1. Else, +inf logits:
 * the lowest such id. temperature 0: argmax. +inf: uniform over the finite logits. values: the winning score as
 * float32 (+-inf beyond its range; at temperature 0 the largest logit), for joining shards; as for argmax in rows
 * that are invalid or dead. Dead rows: token -1, status 0.
 */
typedef struct kdt_sample_params {
  size_t struct_size;
  int32_t num_rows;      /* R >= 0 */
  int32_t vocab_size;    /* V >= 0 */
  int32_t logits_dtype;  /* KDT_F32, KDT_F16 or KDT_BF16 */
  int32_t id_offset;     /* added to every id, >= 0 */
  const void* logits;    /* [R, V] */
  int64_t logits_stride; /* from row to row, >= V */
  uint64_t seed;
  const float* temperatures;  /* [R] */
  const int32_t* positions;   /* [R], of the token to be emitted: for a tree's slot its position + 1 */
  const int64_t* request_ids; /* [R] */
  int32_t* tokens;            /* out [R] */
  float* values;              /* out [R], optional */
  const int32_t* num_live;    /* [1], optional */
  int32_t rows_per_request;   /* >= 1, a divisor of R; 0: 1 */
  int32_t reserved0;          /* reserved */
  int32_t* status;            /* out [R], optional */
  const uint32_t* allowed;    /* reserved: [R, ceil(V / 32)] bitmask of allowed tokens */
} kdt_sample_params;

KDT_API int32_t kdt_sample_workspace_size(const kdt_context* context, const kdt_sample_params* params,
                                          size_t* size);
KDT_API int32_t kdt_sample(const kdt_context* context, const kdt_sample_params* params, void* workspace,
                           size_t workspace_size, void* stream);

/* ---- 8. Attention ---------------------------------------------------------------------------------- */

enum { KDT_LSE_NATURAL = 0, KDT_LSE_BASE2 = 1 };

/*
 * verify_attn: attention of a tree's queries over prefix and tree in absorbed MLA (DeepSeek-V2, arXiv 2405.04434).
 *
 * One KV row of 576 values (512 latent, 64 rope) serves all heads: it is the key, and its first 512 values are
 * the value. score = scale * <q, k>, out = softmax(score) v, lse = log(sum(exp(score))).
 *
 * Logical cache rows 0..prefix_len-1 are the prefix, seen by every query (from kv_starts[b] on, when given). Row
 * prefix_len + j is slot j of the tree, for j < node_count: query i sees it iff bit j of visibility row i is set.
 * Without visibility, query i sees slots 0..i; without node_count, there are Q. So Q = 1 without a tree is plain
 * decode, and kv_starts = prefix_lens is the tree alone, to be merged with another kernel's prefix.
 * Query i >= node_count, and a query that sees nothing: out 0, lse -inf. A query that sees a NaN, or scores of
 * -inf only: NaN. Products and sums are float32 before the scale, so <q, k> has to stay within its range.
 * What no query of a request may see never matters: neither values (NaN) nor page ids there.
 *
 * status: CLAMPED when a number was out of range and clamped: node_count to 0..Q; prefix_len to 0..C - node_count
 * (at least 0), C = max_pages * page_size rows (contiguous: page_size); kv_start to 0..prefix_len; or when a
 * query must see a row at or beyond C, or one whose page id is outside 0..num_pages-1: such rows count as unseen.
 * Dead requests: out 0, lse -inf, status 0.
 *
 * Accumulation is float32 or better. Against float64, ||out - ref|| / ||ref|| <= 1e-5 (f32), 2.5e-3 (bf16), 6e-4
 * (f16), by q's type, over the output of a request, and lse within 1e-5 + 1e-6 |lse|; plans/0003-numerics.md has
 * the conditions.
 */
typedef struct kdt_verify_attn_params {
  size_t struct_size;
  int32_t batch_size;         /* B >= 0 */
  int32_t num_queries;        /* Q, 1..N (without a tree, 1..1025) */
  int32_t num_heads;          /* H, 1..128 */
  int32_t qk_dim;             /* 576, else UNSUPPORTED */
  int32_t v_dim;              /* 512, else UNSUPPORTED */
  int32_t q_dtype;            /* KDT_F32, KDT_F16 or KDT_BF16 */
  int32_t kv_dtype;           /* q_dtype, else UNSUPPORTED */
  int32_t out_dtype;          /* q_dtype or KDT_F32, else UNSUPPORTED */
  int32_t lse_base;           /* KDT_LSE_NATURAL or KDT_LSE_BASE2 */
  float scale;                /* finite */
  const void* q;              /* [B, Q, H, 576] */
  int64_t q_stride;           /* from request to request; these three may be in any order, each >= 576 */
  int64_t q_row_stride;       /* from query to query; 0: H * q_head_stride */
  int64_t q_head_stride;      /* from head to head */
  const kdt_kv_cache* cache;  /* one layer (data, not layer_data), row_width 576; page_size a power of two <= 256
                                 when paged, any number of rows when contiguous */
  const int32_t* prefix_lens; /* [B] */
  const int32_t* kv_starts;   /* [B], optional */
  const kdt_tree* tree;       /* optional; reads visibility and node_count, each of which may be NULL */
  const int32_t* num_live;    /* [1], optional */
  void* out;                  /* out [B, Q, H, 512] */
  int64_t out_stride;         /* as for q, each >= 512 */
  int64_t out_row_stride;
  int64_t out_head_stride;
  float* lse;             /* out [B, Q, H] */
  int64_t lse_stride;     /* in any order, each >= 1 */
  int64_t lse_row_stride; /* 0: H * lse_head_stride */
  int64_t lse_head_stride;
  int32_t* status;          /* out [B], optional */
  const int32_t* qo_indptr; /* reserved: ragged queries */
  const void* q_rope;       /* reserved: rope parts in tensors of their own */
  const void* kv_rope;      /* reserved */
  const float* kv_scales;   /* reserved: 8-bit cache */
  int32_t split_len;        /* reserved: a fixed split, for results independent of the batch */
  int32_t reserved0;        /* reserved */
} kdt_verify_attn_params;

KDT_API int32_t kdt_verify_attn_workspace_size(const kdt_context* context, const kdt_verify_attn_params* params,
                                               size_t* size);
KDT_API int32_t kdt_verify_attn(const kdt_context* context, const kdt_verify_attn_params* params, void* workspace,
                                size_t workspace_size, void* stream);

/*
 * merge_attn_states: attention over two disjoint sets of keys, from the results over each (FlashAttention's online
 * softmax, arXiv 2205.14135): weights w = exp(lse - max), out = (w_a a + w_b b) / (w_a + w_b), lse = log of the
 * sum.
 *
 * An lse of -inf or +inf means an empty side, whose out is never used (FlashMLA writes +inf); both empty: out 0,
 * lse -inf. A NaN lse, or NaN in the out of a side that counts, propagates.
 * In place: out may be a (with a's strides and dtype) or b, and lse likewise; other overlaps are refused.
 * Dead rows: out 0, lse -inf.
 */
typedef struct kdt_merge_attn_states_params {
  size_t struct_size;
  int32_t num_rows;  /* R >= 0, B * Q */
  int32_t num_heads; /* H >= 1 */
  int32_t v_dim;     /* D >= 1, any */
  int32_t lse_base;  /* of all three: KDT_LSE_NATURAL or KDT_LSE_BASE2 */
  int32_t a_dtype;   /* KDT_F32, KDT_F16 or KDT_BF16 */
  int32_t b_dtype;
  int32_t out_dtype;
  int32_t rows_per_request; /* >= 1, a divisor of R; 0: 1 */
  const void* a;            /* [R, H, D] */
  int64_t a_row_stride;     /* in any order, each >= D */
  int64_t a_head_stride;
  const float* a_lse;       /* [R, H] */
  int64_t a_lse_row_stride; /* in any order, each >= 1 */
  int64_t a_lse_head_stride;
  const void* b; /* as a */
  int64_t b_row_stride;
  int64_t b_head_stride;
  const float* b_lse;
  int64_t b_lse_row_stride;
  int64_t b_lse_head_stride;
  void* out; /* out, as a */
  int64_t out_row_stride;
  int64_t out_head_stride;
  float* lse; /* out, as a_lse */
  int64_t lse_row_stride;
  int64_t lse_head_stride;
  const int32_t* num_live; /* [1], optional */
} kdt_merge_attn_states_params;

KDT_API int32_t kdt_merge_attn_states_workspace_size(const kdt_context* context,
                                                     const kdt_merge_attn_states_params* params, size_t* size);
KDT_API int32_t kdt_merge_attn_states(const kdt_context* context, const kdt_merge_attn_states_params* params,
                                      void* workspace, size_t workspace_size, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* KDTREE_KDTREE_H */
