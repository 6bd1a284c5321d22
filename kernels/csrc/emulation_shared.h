// Shared memory of one block on the CPU: filled with a byte that shows an uninitialised read, and bounded where feasible.
// Owns where static and dynamic shared memory lie. Not here: when a block begins (emulation_block.h).
#pragma once

#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#pragma GCC visibility push(hidden)
namespace stoker::emulation {

#if defined(__SANITIZE_ADDRESS__)
inline void poison_static_shared(int) {}  // plain static variables here, with the sanitizer's red zones around them
#else
// Static shared arrays are thread_local variables of this library and there are no others in it: its block of
// thread-local storage is the shared memory.
struct StaticShared {
    char* first = nullptr;
    size_t bytes = 0;
};

inline StaticShared static_shared() {
    static thread_local char anchor;
    *const_cast<volatile char*>(&anchor) = 0;  // storage of a loaded library is allocated at the first use
    struct Search {
        uintptr_t inside;
        StaticShared found;
    } search{reinterpret_cast<uintptr_t>(&anchor), {}};
    dl_iterate_phdr(
        [](dl_phdr_info* object, size_t, void* argument) {
            Search& search = *static_cast<Search*>(argument);
            const uintptr_t data = reinterpret_cast<uintptr_t>(object->dlpi_tls_data);
            for (int i = 0; i < object->dlpi_phnum && data != 0; ++i) {
                const auto& segment = object->dlpi_phdr[i];
                if (segment.p_type == PT_TLS && search.inside - data < segment.p_memsz) {
                    search.found = {reinterpret_cast<char*>(data), segment.p_memsz};
                    return 1;
                }
            }
            return 0;
        },
        &search);
    return search.found;
}

inline void poison_static_shared(int byte) {
    const StaticShared memory = static_shared();
    std::memset(memory.first, byte, memory.bytes);
}
#endif

// Memory of exactly the size that was asked for, anew for each block, between two fields that nothing may write.
class DynamicShared {
  public:
    DynamicShared(size_t bytes, int byte) : bytes_(bytes) {
        if (bytes == 0) {
            return;
        }
        if (posix_memalign(&memory_, 128, bytes + 2 * kField) != 0) {
            throw std::bad_alloc();
        }
        std::memset(memory_, kMark, bytes + 2 * kField);
        std::memset(data(), byte, bytes);
    }
    ~DynamicShared() { std::free(memory_); }
    DynamicShared(const DynamicShared&) = delete;
    DynamicShared& operator=(const DynamicShared&) = delete;

    char* data() const { return memory_ == nullptr ? nullptr : static_cast<char*>(memory_) + kField; }
    bool intact() const {
        const auto marked = [](const char* field) {
            return std::all_of(field, field + kField, [](char byte) { return byte == static_cast<char>(kMark); });
        };
        return memory_ == nullptr || (marked(static_cast<char*>(memory_)) && marked(data() + bytes_));
    }

  private:
#if defined(__SANITIZE_ADDRESS__)
    static constexpr size_t kField = 0;  // the sanitizer's red zones do it
#else
    static constexpr size_t kField = 128;
#endif
    static constexpr int kMark = 0x5e;
    void* memory_ = nullptr;
    size_t bytes_;
};

}  // namespace stoker::emulation
#pragma GCC visibility pop
