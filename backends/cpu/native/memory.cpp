#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>

namespace ew {
namespace {

struct File {
    int descriptor;
    size_t size = 0;
    const std::string &path;

    explicit File(const std::string &path_) : path(path_) {
        descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (descriptor < 0)
            fail("open");
        struct stat status;
        if (fstat(descriptor, &status) != 0) {
            close(descriptor);
            fail("read the size of");
        }
        size = size_t(status.st_size);
    }
    ~File() { close(descriptor); }
    [[noreturn]] void fail(const char *what) const {
        throw std::runtime_error(std::string("cannot ") + what + " " + path + ": " + std::strerror(errno));
    }
};

} // namespace

Mapping Mapping::anonymous(size_t bytes, bool huge_pages) {
    Mapping result;
    if (bytes == 0)
        return result;
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        throw std::bad_alloc();
    result.data_ = static_cast<uint8_t *>(memory);
    result.size_ = bytes;
#ifdef MADV_HUGEPAGE
    if (huge_pages)
        madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return result;
}

Mapping Mapping::file(const std::string &path) {
    const File file(path);
    Mapping result;
    if (file.size == 0)
        return result;
    void *memory = mmap(nullptr, file.size, PROT_READ, MAP_SHARED, file.descriptor, 0);
    if (memory == MAP_FAILED)
        file.fail("map");
    result.data_ = static_cast<uint8_t *>(memory);
    result.size_ = file.size;
    madvise(memory, file.size, MADV_WILLNEED);
    return result;
}

Mapping Mapping::file_copy(const std::string &path) {
    const File file(path);
    Mapping result = anonymous(file.size, true);
    size_t done = 0;
    while (done < file.size) {
        const ssize_t got = read(file.descriptor, result.data_ + done, file.size - done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            file.fail("read");
        if (got == 0)
            throw std::runtime_error("cannot read " + path + ": it became shorter meanwhile");
        done += size_t(got);
    }
    return result;
}

void Mapping::release() {
    if (data_)
        munmap(data_, size_);
    data_ = nullptr;
    size_ = 0;
}

} // namespace ew
