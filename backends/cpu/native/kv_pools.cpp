#include "kv_pools.h"

#include <cstring>
#include <limits>
#include <stdexcept>

namespace ew {
namespace {

int64_t page_aligned(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

std::string number(int64_t n) { return std::to_string(n); }

} // namespace

void KvPools::create(const std::vector<int64_t> &pages) {
    if (pages.size() != groups_.size())
        throw std::invalid_argument("the program has " + number(int64_t(groups_.size())) +
                                    " KV groups, got page counts of " + number(int64_t(pages.size())));
    std::vector<Group> fresh(groups_.size());
    for (size_t g = 0; g < pages.size(); ++g) {
        if (pages[g] < 1 || pages[g] > std::numeric_limits<int32_t>::max())
            throw std::invalid_argument("a pool has at least one page, got " + number(pages[g]));
        fresh[g].pages = pages[g];
        int64_t bytes = 0;
        for (const KvLayer &layer : layout_[g].layers) {
            fresh[g].layer_offset.push_back(bytes);
            bytes += page_aligned(layer.layout.page_bytes * pages[g]);
        }
        fresh[g].memory = Mapping::anonymous(size_t(bytes), true);
        fresh[g].written.assign(size_t(pages[g]), -1);
    }
    groups_ = std::move(fresh);
}

void KvPools::copy(int64_t group, const int32_t *sources, const int32_t *destinations, int64_t count) {
    if (group < 0 || group >= int64_t(groups_.size()))
        throw std::invalid_argument("there is no KV group " + number(group));
    const Group &pool = groups_[size_t(group)];
    for (int64_t i = 0; i < count; ++i)
        for (const int32_t page : {sources[i], destinations[i]})
            if (page < 0 || page >= pool.pages)
                throw std::invalid_argument("page " + number(page) + " does not lie in the pool of " +
                                            number(pool.pages));
    const auto &layers = layout_[size_t(group)].layers;
    for (size_t l = 0; l < layers.size(); ++l) {
        uint8_t *base = pool.memory.data() + pool.layer_offset[l];
        const int64_t bytes = layers[l].layout.page_bytes;
        for (int64_t i = 0; i < count; ++i)
            if (sources[i] != destinations[i])
                std::memcpy(base + destinations[i] * bytes, base + sources[i] * bytes, size_t(bytes));
    }
}

void KvPools::fill(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    for (size_t g = 0; g < groups_.size(); ++g) {
        const auto &layers = layout_[g].layers;
        for (size_t l = 0; l < groups_[g].layer_offset.size(); ++l) {
            const bool half = layers[l].layout.format == KvFormat::bf16;
            const uint32_t pattern = half ? (bits & 0xffff0000u) | bits >> 16 : bits;
            uint8_t *data = layer(g, l);
            for (int64_t i = 0; i < layers[l].layout.page_bytes * groups_[g].pages; i += 4)
                std::memcpy(data + i, &pattern, 4);
        }
    }
}

int64_t KvPools::bytes() const {
    int64_t sum = 0;
    for (const Group &group : groups_)
        sum += int64_t(group.memory.size());
    return sum;
}

std::string KvPools::difference(const std::vector<KvGroup> &other) const {
    if (other.size() != layout_.size())
        return number(int64_t(other.size())) + " KV groups, expected " + number(int64_t(layout_.size()));
    for (size_t g = 0; g < other.size(); ++g) {
        const std::string where = "KV group " + number(int64_t(g));
        const KvGroup &mine = layout_[g], &its = other[g];
        if (its.window != mine.window || its.page_size != mine.page_size || its.layers.size() != mine.layers.size())
            return where + " has a window of " + number(its.window) + ", pages of " + number(its.page_size) + " and " +
                   number(int64_t(its.layers.size())) + " layers, expected " + number(mine.window) + ", " +
                   number(mine.page_size) + " and " + number(int64_t(mine.layers.size()));
        for (size_t l = 0; l < its.layers.size(); ++l) {
            const KvLayer &a = mine.layers[l], &b = its.layers[l];
            if (a.kv_heads != b.kv_heads || a.key_dim != b.key_dim || a.value_dim != b.value_dim ||
                a.layout.format != b.layout.format)
                return where + ", layer " + number(int64_t(l)) + " stores other keys and values";
        }
    }
    return "";
}

} // namespace ew
