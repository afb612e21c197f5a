// The Python module `enginewright.backends.cpu._native`: each part of the native code binds itself.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace ew {
void bind_kernels(nb::module_ &m);   // bind_kernels.cpp: linear and row kernels, for tests
void bind_attention(nb::module_ &m); // bind_attention.cpp: attention, cache and sampling rows
void bind_draw(nb::module_ &m);      // bind_draw.cpp: drawing tokens from rows of logits
void bind_engine(nb::module_ &m);    // bind_engine.cpp: Engine, the executor's native half
} // namespace ew

NB_MODULE(_native, m) {
    m.doc() = "Native kernels and executor of the cpu backend.";
    ew::bind_kernels(m);
    ew::bind_attention(m);
    ew::bind_draw(m);
    ew::bind_engine(m);
}
