// The kernels for AVX2. Compiled with -mavx2 -mfma -mf16c.
#if defined(__x86_64__)
#define EW_ISA_NS avx2
#define EW_ISA_NAME "avx2"
#define EW_ISA_AVX2
#include "kernel_table.inl"
#endif
