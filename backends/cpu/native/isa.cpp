// Which kernel table this machine uses. Compiled for the baseline: it runs before anything is known of the machine.
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "kernels.h"

namespace ew {

namespace portable {
extern const Kernels table;
}
#if defined(__x86_64__)
namespace avx512 {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
#endif

namespace {

struct Variant {
  const Kernels* table;
  bool (*runs_here)();
};

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
#endif

/// All variants of this build, best first.
constexpr Variant kVariants[] = {
#if defined(__x86_64__)
    {&avx512::table, has_avx512},
    {&avx2::table, has_avx2},
#endif
    {&portable::table, [] { return true; }},
};

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

const Kernels& choose() {
  const char* wanted = std::getenv("ENGINEWRIGHT_ISA");
  if (wanted == nullptr || *wanted == '\0') return *kernels_by_name(available_isas().front().c_str());
  if (const Kernels* found = kernels_by_name(wanted)) return *found;
  throw std::runtime_error("ENGINEWRIGHT_ISA=" + std::string(wanted) + ": this machine runs " + joined(available_isas()) +
                           "; unset the variable or name one of these");
}

}  // namespace

const Kernels* kernels_by_name(const char* name) {
  for (const Variant& variant : kVariants) {
    if (std::strcmp(variant.table->name, name) == 0) return variant.runs_here() ? variant.table : nullptr;
  }
  return nullptr;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Variant& variant : kVariants) {
    if (variant.runs_here()) names.emplace_back(variant.table->name);
  }
  return names;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace ew
