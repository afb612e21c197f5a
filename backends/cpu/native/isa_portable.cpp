// The kernels for any machine: no flags beyond the compiler's baseline.
#define EW_ISA_NS portable
#define EW_ISA_NAME "portable"
#define EW_ISA_PORTABLE
#include "kernel_table.inl"
