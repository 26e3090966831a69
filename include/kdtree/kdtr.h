/*
 * KDTR: a small binary container of named tensors and string attributes (fixtures, traces, weights).
 * The format is described byte by byte in plans/0002-kdtr-format.md; kdtree_engine.kdtr reads and writes the
 * same files in Python, with the same verdict and the same code on every file, good or bad.
 *
 * The reader is strict and safe on hostile input. It reports the first fault in the order of checks
 * that the format page gives, allocates no more than the bytes that are there, and never crashes.
 * Functions return KDT_OK or a status; kdt_last_error() has the text (see kdtree.h).
 */
#ifndef KDTREE_KDTR_H
#define KDTREE_KDTR_H

#include "kdtree/kdtree.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Caps a file must keep to. */
#define KDTR_MAX_DIMS 8
#define KDTR_MAX_TENSORS 65536
#define KDTR_MAX_ATTRS 65536
#define KDTR_MAX_NAME 255         /* bytes of a tensor's or an attribute's name, >= 1 */
#define KDTR_MAX_INDEX (64 << 20) /* bytes of the index */

enum {
  KDTR_ERR_IO = 500,             /* the file cannot be opened, read or written, or is no regular file */
  KDTR_ERR_NOT_FOUND = 501,      /* no tensor or attribute of that name */
  KDTR_ERR_TOO_SHORT = 510,      /* fewer bytes than a header has */
  KDTR_ERR_MAGIC = 511,          /* not a KDTR file */
  KDTR_ERR_VERSION = 512,        /* a version this reader does not know */
  KDTR_ERR_RESERVED = 513,       /* reserved header bytes are not zero */
  KDTR_ERR_FILE_SIZE = 514,      /* the header's file size is not the number of bytes there */
  KDTR_ERR_CAP = 515,            /* more tensors, attributes or index bytes than the caps or the file allow */
  KDTR_ERR_INDEX_CHECKSUM = 516, /* header or index damaged */
  KDTR_ERR_INDEX = 517,          /* an index entry runs past the index, or bytes are left over */
  KDTR_ERR_NAME = 518,           /* a name (empty, too long, not UTF-8, a NUL, twice) or value (not UTF-8) */
  KDTR_ERR_DTYPE = 519,          /* unknown dtype code */
  KDTR_ERR_SHAPE = 520,          /* more than 8 dimensions, or a shape whose byte count overflows */
  KDTR_ERR_SIZE = 521,           /* byte count and shape disagree */
  KDTR_ERR_OFFSET = 522,         /* tensors out of order, with holes or overlaps, or past the end */
  KDTR_ERR_PADDING = 523,        /* padding bytes are not zero */
  KDTR_ERR_DATA_CHECKSUM = 524,  /* a tensor's bytes are damaged */
  KDTR_ERR_VALUE = 525           /* a bool that is neither 0 nor 1 */
};

/* ---- Element types --------------------------------------------------------------------------------- */

/* The codes are the file's. A bool is one byte, 0 or 1. */
enum {
  KDTR_F64 = 1,
  KDTR_F32 = 2,
  KDTR_F16 = 3,
  KDTR_BF16 = 4,
  KDTR_I64 = 5,
  KDTR_I32 = 6,
  KDTR_I16 = 7,
  KDTR_I8 = 8,
  KDTR_U64 = 9,
  KDTR_U32 = 10,
  KDTR_U16 = 11,
  KDTR_U8 = 12,
  KDTR_BOOL = 13
};

/* Bytes an element takes; 0 for a number that is no dtype. */
KDT_API size_t kdtr_dtype_size(int32_t dtype);

/* ---- Tensors and attributes ------------------------------------------------------------------------ */

typedef struct kdtr_tensor {
  const char* name;            /* UTF-8, NUL-terminated */
  int32_t dtype;               /* KDTR_F64 .. KDTR_BOOL */
  int32_t ndim;                /* 0..8 */
  int64_t dims[KDTR_MAX_DIMS]; /* the first ndim count; the reader sets the others to 0 */
  const void* data;            /* row-major, little endian; may be NULL for kdtr_save when nbytes is 0 */
  uint64_t nbytes;             /* product of dims * kdtr_dtype_size(dtype) */
} kdtr_tensor;

typedef struct kdtr_attr {
  const char* key;   /* UTF-8, NUL-terminated */
  const char* value; /* UTF-8, may hold NULs; the reader puts a NUL behind it, kdtr_save needs none.
                        May be NULL for kdtr_save when value_size is 0 */
  size_t value_size; /* bytes, without the terminator */
} kdtr_attr;

/* ---- Reading --------------------------------------------------------------------------------------- */

/* A file that passed every check. Immutable; may be read from many threads at once. */
typedef struct kdtr_file kdtr_file;

/* Reads and checks a regular file. Tensor data is 64-byte aligned. On an error *file is NULL.
 * Errors: NULL_POINTER, OUT_OF_MEMORY, KDTR_ERR_IO (also for anything but a regular file) and 510..525. */
KDT_API int32_t kdtr_open(const char* path, kdtr_file** file);

/* Checks `size` bytes at `data`, of any alignment, without copying them: they must stay as they are until
 * kdtr_close. Tensor data is 64-byte aligned if `data` is. data may be NULL when size is 0.
 * On an error *file is NULL. Errors: NULL_POINTER, OUT_OF_MEMORY and 510..525. */
KDT_API int32_t kdtr_parse(const void* data, size_t size, kdtr_file** file);

/* Frees the file and all that the functions below returned from it. NULL is allowed. */
KDT_API void kdtr_close(kdtr_file* file);

/* How many there are; 0 for NULL. */
KDT_API size_t kdtr_num_tensors(const kdtr_file* file);
KDT_API size_t kdtr_num_attrs(const kdtr_file* file);

/* The one at `index`, in file order. On an error the struct is zeroed.
 * Errors: NULL_POINTER, INVALID_ARGUMENT (index out of range). */
KDT_API int32_t kdtr_tensor_at(const kdtr_file* file, size_t index, kdtr_tensor* tensor);
KDT_API int32_t kdtr_attr_at(const kdtr_file* file, size_t index, kdtr_attr* attr);

/* The one of that name, in O(log n). On an error the struct is zeroed. Errors: NULL_POINTER, NOT_FOUND. */
KDT_API int32_t kdtr_find_tensor(const kdtr_file* file, const char* name, kdtr_tensor* tensor);
KDT_API int32_t kdtr_find_attr(const kdtr_file* file, const char* key, kdtr_attr* attr);

/* ---- Writing --------------------------------------------------------------------------------------- */

/* Writes a file, the same bytes for the same arguments, or leaves everything as it was: the arguments are
 * checked first, and a temporary file in the same directory (mode 0666 less the umask) is synced and renamed
 * over `path`. A symbolic link at `path` is followed; anything else there must be a regular file. Arrays
 * without elements may be NULL.
 * Errors: NULL_POINTER, OUT_OF_MEMORY, KDTR_ERR_IO, CAP, NAME, DTYPE, SHAPE, SIZE, VALUE. */
KDT_API int32_t kdtr_save(const char* path, const kdtr_tensor* tensors, size_t num_tensors, const kdtr_attr* attrs,
                          size_t num_attrs);

#ifdef __cplusplus
}
#endif

#endif /* KDTREE_KDTR_H */
