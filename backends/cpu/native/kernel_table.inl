// One variant's kernel table: the end of every isa_*.cpp, after its macros.
#include "attention.inl"
#include "draw.inl"
#include "embedding.inl"
#include "kv_cache.inl"
#include "linear.inl"
#include "rope.inl"
#include "rows.inl"
#include "sample.inl"

namespace ew::EW_ISA_NS {

extern const Kernels table;
const Kernels table = {
    .name = EW_ISA_NAME,
    .prepared_row_bytes = prepared_row_bytes,
    .prepare = prepare,
    .linear = linear,
    .embedding = embedding,
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .activation = activation,
    .gated = gated,
    .attention = {.kv_write = kv_write,
                  .rope = rope,
                  .attention = attention,
                  .attention_span = attention_span,
                  .attention_merge = attention_merge,
                  .argmax = argmax,
                  .logsumexp = logsumexp,
                  .softmax = softmax},
    .draw = {.block_maxima = block_maxima,
             .sum_below = sum_below,
             .mask = mask,
             .weigh = weigh,
             .weigh_larger = weigh_larger,
             .weigh_depths = weigh_depths,
             .weigh_nearer = weigh_nearer,
             .within = within,
             .noisy_argmax = noisy_argmax},
};

}  // namespace ew::EW_ISA_NS
