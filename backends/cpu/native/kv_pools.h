// The pools of keys and values: every layer's pages, in groups of layers that share page tables.
//
// Several engines may work on one set of pools (an engine and those made beside it); one of them runs at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory.h"
#include "program.h"

namespace ew {

class KvPools {
  public:
    explicit KvPools(const std::vector<KvGroup> &groups) : layout_(groups), groups_(groups.size()) {}

    // Makes new, zeroed pools of so many pages a KV group; the old ones are gone. Throws std::invalid_argument.
    void create(const std::vector<int64_t> &pages);
    // Copies pages sources[i] to destinations[i], in order, in every layer of the group. Throws std::invalid_argument.
    void copy(int64_t group, const int32_t *sources, const int32_t *destinations, int64_t count);
    // Sets every number; codes of int8 become the number's bytes.
    void fill(float value);

    size_t groups() const { return groups_.size(); }
    int64_t pages(size_t group) const { return groups_[group].pages; }
    int64_t bytes() const;
    uint8_t *layer(size_t group, size_t layer) const {
        return groups_[group].memory.data() + groups_[group].layer_offset[layer];
    }

    // Begins the check of a step's page tables; mark_written says whether the page was marked in this step before.
    void begin_step() { ++steps_; }
    bool mark_written(size_t group, int32_t page) {
        int64_t &written = groups_[group].written[size_t(page)];
        const bool before = written == steps_;
        written = steps_;
        return before;
    }

    // Empty where the layers of `other` have the same places and forms, else what differs.
    std::string difference(const std::vector<KvGroup> &other) const;

  private:
    struct Group {
        Mapping memory;
        int64_t pages = 0;
        std::vector<int64_t> layer_offset;
        std::vector<int64_t> written; // per page: the step that last wrote it (validation)
    };
    const std::vector<KvGroup> layout_;
    std::vector<Group> groups_;
    int64_t steps_ = 0;
};

} // namespace ew
