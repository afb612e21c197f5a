// Memory that comes straight from the kernel: page aligned, zero filled, committed when first touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace ew {

class Mapping {
  public:
    Mapping() = default;
    Mapping(Mapping &&other) noexcept { swap(other); }
    Mapping &operator=(Mapping &&other) noexcept {
        Mapping moved(std::move(other));
        swap(moved);
        return *this;
    }
    ~Mapping() { release(); }

    // Zeroed memory of `bytes` bytes. Throws std::bad_alloc.
    static Mapping anonymous(size_t bytes, bool huge_pages);
    // A whole file, read only, its pages shared with every process that maps it.
    static Mapping file(const std::string &path);
    // A whole file's content in memory of our own, in huge pages where the system grants them.
    static Mapping file_copy(const std::string &path);

    uint8_t *data() const { return data_; }
    size_t size() const { return size_; }
    void release();

  private:
    void swap(Mapping &other) {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }
    uint8_t *data_ = nullptr;
    size_t size_ = 0;
};

} // namespace ew
