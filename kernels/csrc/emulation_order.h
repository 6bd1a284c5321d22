// The order in which the emulation runs blocks and threads, and which blocks it runs: read from the environment at each
// launch. Pure functions of STOKER_EMULATION_ORDER, _BLOCKS and _MULTIPROCESSORS.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#pragma GCC visibility push(hidden)
namespace stoker::emulation {

enum class Order : uint8_t { ascending, descending, random };

// STOKER_EMULATION_ORDER=ascending|descending|random:<seed>; random:0 when unset. Read at each launch.
struct Schedule {
    Order order = Order::random;
    uint64_t seed = 0;

    static Schedule from_environment() {
        const char* text = std::getenv("STOKER_EMULATION_ORDER");
        const std::string value = text == nullptr || *text == 0 ? "random:0" : text;
        if (value == "ascending") {
            return {Order::ascending, 0};
        }
        if (value == "descending") {
            return {Order::descending, 0};
        }
        char* end = nullptr;
        if (value.rfind("random:", 0) == 0 && value.size() > 7) {
            const uint64_t seed = std::strtoull(value.c_str() + 7, &end, 10);
            if (*end == 0) {
                return {Order::random, seed};
            }
        }
        throw std::runtime_error("STOKER_EMULATION_ORDER is '" + value +
                                 "'; expected ascending, descending or random:<seed>");
    }

    uint64_t next() {  // splitmix64
        uint64_t z = (seed += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }

    // 0 .. size - 1 in this order.
    void permute(std::vector<unsigned>& indices, unsigned size) {
        indices.resize(size);
        std::iota(indices.begin(), indices.end(), 0u);
        if (order == Order::descending) {
            std::reverse(indices.begin(), indices.end());
        }
        for (unsigned i = size - 1; order == Order::random && i > 0; --i) {
            std::swap(indices[i], indices[next() % (i + 1)]);
        }
    }
};

// Which blocks of a grid run: all, or those of STOKER_EMULATION_BLOCKS, a list of integers that are taken modulo the
// number of blocks (-1 is the last); with "name:" before them, of kernels alone that have this in their name. For tensors
// so large that the blocks in the middle would take hours.
class Blocks {
  public:
    Blocks(const std::string& kernel, uint64_t total) : count_(total) {
        const char* text = std::getenv("STOKER_EMULATION_BLOCKS");
        if (text == nullptr || *text == 0) {
            return;
        }
        if (const char* colon = std::strchr(text, ':'); colon != nullptr) {
            if (kernel.find(std::string(text, colon)) == std::string::npos) {
                return;
            }
            text = colon + 1;
        }
        const int64_t size = static_cast<int64_t>(total);
        for (char* end = nullptr; *text != 0; text = *end == ',' ? end + 1 : end) {
            const int64_t value = std::strtoll(text, &end, 10);
            if (end == text || (*end != 0 && *end != ',')) {
                throw std::runtime_error(std::string("STOKER_EMULATION_BLOCKS has '") + text +
                                         "'; expected integers with commas between them");
            }
            chosen_.push_back(static_cast<uint64_t>((value % size + size) % size));
        }
        std::sort(chosen_.begin(), chosen_.end());
        chosen_.erase(std::unique(chosen_.begin(), chosen_.end()), chosen_.end());
        count_ = chosen_.size();
    }
    uint64_t count() const { return count_; }
    uint64_t operator[](uint64_t i) const { return chosen_.empty() ? i : chosen_[i]; }

  private:
    uint64_t count_;
    std::vector<uint64_t> chosen_;
};

// Of the device that is emulated: 2, or STOKER_EMULATION_MULTIPROCESSORS. With very many, a block has so few rows of a
// huge tensor to walk over that it can be run.
inline int multiprocessors() {
    const char* text = std::getenv("STOKER_EMULATION_MULTIPROCESSORS");
    return text == nullptr || *text == 0 ? 2 : std::max(1, std::atoi(text));
}

// Bytes that an uninitialised read finds: NaN in every floating-point type, or a large number, depending on the order of
// threads, so that a result which does not change with the order does not come from them.
inline int poison(Order order) {
    return order == Order::ascending ? 0xff : 0x7b;
}

}  // namespace stoker::emulation
#pragma GCC visibility pop
