// Names of weight and activation formats, and which of them go together (the rules of recipes/formats.py).
#include "formats.h"

#include <cstring>

namespace ew {
namespace {

/// Takes `prefix` off the front of `text`.
bool take(const char*& text, const char* prefix) {
  const size_t length = std::strlen(prefix);
  if (std::strncmp(text, prefix, length) != 0) return false;
  text += length;
  return true;
}

/// Takes "_g16" .. "_g256" off the front; 0 where there is none.
int32_t take_group(const char*& text) {
  // 128 and 16 begin alike: the longer is tried first.
  static constexpr struct {
    const char* text;
    int32_t size;
  } kGroups[] = {{"_g256", 256}, {"_g128", 128}, {"_g64", 64}, {"_g32", 32}, {"_g16", 16}};
  for (const auto& group : kGroups) {
    if (take(text, group.text)) return group.size;
  }
  return 0;
}

}  // namespace

bool parse_weight_format(const char* name, WeightFormat& format) {
  static constexpr struct {
    const char* text;
    WeightKind kind;
    int32_t bits;
  } kNames[] = {{"f32", WeightKind::f32, 32},   {"bf16", WeightKind::bf16, 16},  {"fp8", WeightKind::fp8, 8},
                {"int8", WeightKind::symmetric, 8}, {"uint8", WeightKind::offset, 8}, {"int4", WeightKind::offset, 4},
                {"int3", WeightKind::offset, 3}, {"int2", WeightKind::offset, 2}};
  for (const auto& known : kNames) {
    const char* rest = name;
    if (!take(rest, known.text)) continue;
    format = {known.kind, known.bits, 0};
    if (is_integer(format)) format.group = take_group(rest);
    if (format.kind == WeightKind::offset && take(rest, "_zp")) format.kind = WeightKind::zero;
    return *rest == '\0';
  }
  return false;
}

bool parse_activation_format(const char* name, ActivationFormat& format) {
  format = {};
  if (std::strcmp(name, "f32") == 0) return true;
  if (std::strcmp(name, "bf16") == 0) {
    format.kind = ActivationKind::bf16;
    return true;
  }
  if (std::strcmp(name, "int8_static") == 0) {
    format.kind = ActivationKind::fixed;
    return true;
  }
  if (!take(name, "int8")) return false;
  format.group = take_group(name);
  format.kind = format.group != 0 ? ActivationKind::group : ActivationKind::token;
  return *name == '\0' && format.group <= 128;
}

ActivationFormat default_activation(WeightFormat format) {
  if (format.kind == WeightKind::f32) return {ActivationKind::f32};
  if (!is_integer(format)) return {ActivationKind::bf16};
  const int32_t group = format.group == 0 ? kChannelStep : format.group < 128 ? format.group : 128;
  return {ActivationKind::group, group};
}

bool activation_fits(WeightFormat weight, ActivationFormat activation) {
  const ActivationFormat standard = default_activation(weight);
  if (activation.kind == standard.kind && activation.group == standard.group) return true;
  return is_integer(weight) &&
         (activation.kind == ActivationKind::token || activation.kind == ActivationKind::fixed);
}

}  // namespace ew
