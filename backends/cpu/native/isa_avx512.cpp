// The kernels for AVX-512 with VNNI and BF16. Compiled with
// -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16 -mfma -mf16c.
#if defined(__x86_64__)
#define EW_ISA_NS avx512
#define EW_ISA_NAME "avx512"
#define EW_ISA_AVX512
#include "kernel_table.inl"
#endif
