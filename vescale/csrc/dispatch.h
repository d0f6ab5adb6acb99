// What the dispatcher of ops on DTensors knows of calls.

#pragma once

#include "call.h"
#include "specs.h"

#include <array>
#include <chrono>

namespace vescale {

// A result of an op: a new DTensor, an argument that the op wrote to, or something that is passed on as it is.
struct Result {
    std::vector<const Spec*> specs;  // of the tensors of a list; one for a tensor; a null spec passes the tensor on
    int written = -1;                // the argument that is returned
    int viewed = -1;                 // the argument whose storage the results share
};

// What a rank takes of a whole argument: its position, the dim (-1: one of equal summands), the number of parts, this rank's, and
// the number of chunks side by side that are cut alike.
using Part = std::array<std::int64_t, 5>;

// What runs for calls with one key: the op on the local tensors, or whatever PyTorch does.
struct Entry {
    bool is_stock = true;
    std::vector<Result> results;
    std::vector<std::pair<int, c10::IValue>> replaced;  // arguments that differ on the local tensors: sizes of views
    std::vector<Part> parts;
};

// One of equal summands of a whole tensor (dim -1), or of equal parts, in memory of its own, as PyTorch makes it. Dims along
// which the tensor is expanded stay expanded, because strides decide about those of results.
inline at::Tensor part_of(const at::Tensor& whole, const Part& taken) {
    const auto& [position, dim, num_parts, ours, chunks] = taken;
    if (dim < 0) {
        return whole.div(num_parts);
    }
    if (chunks > 1) {
        const auto parts = whole.unflatten(dim, {chunks, num_parts, whole.size(dim) / (chunks * num_parts)});
        return parts.select(dim + 1, ours).clone(at::MemoryFormat::Contiguous).flatten(dim, dim + 1);
    }
    const auto length = whole.size(dim) / num_parts;
    at::Tensor part = whole.narrow(dim, ours * length, length).clone();
    auto strides = part.strides().vec();
    bool is_expanded = false;
    for (const auto i : c10::irange(whole.dim())) {
        if (whole.size(i) > 1 && part.size(i) > 1 && whole.stride(i) == 0) {
            strides[i] = 0;
            is_expanded = true;
        }
    }
    return is_expanded ? part.as_strided(part.sizes(), strides) : part;
}

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// How many calls an op had, by what ran them.
struct Counts {
    std::uint64_t hits = 0;
    std::uint64_t misses = 0;
    double seconds_of_misses = 0;
    std::unordered_map<const char*, std::pair<std::uint64_t, double>> stock;  // reason -> calls, seconds
};

// Learns whether all ops that the thread runs on DTensors, while this exists, run on the local tensors as they are, or with
// parts of `divided`. A watch inside of another hides what it sees from that one: deciding about an op runs others.
class WatchCalls {
  public:
    explicit WatchCalls(const at::Tensor& divided = {}) : outer_(current()), divided_(divided) { current() = this; }
    ~WatchCalls() { current() = outer_; }
    WatchCalls(const WatchCalls&) = delete;
    WatchCalls& operator=(const WatchCalls&) = delete;

    bool all_local() const { return all_local_; }
    const std::vector<Part>& parts() const { return parts_; }

    static void note_other() {
        has_other() = true;
        if (current() != nullptr) {
            current()->all_local_ = false;
        }
    }

    static void note_part(const at::Tensor& whole, const Part& taken) {
        if (current() == nullptr || !current()->divided_.is_same(whole)) {
            return note_other();
        }
        has_other() = true;
        current()->parts_.push_back(taken);
    }

    // Whether the thread has run another op since this was set to false, inside of a watch or not.
    static bool& has_other() {
        static thread_local bool other = false;
        return other;
    }

  private:
    static WatchCalls*& current() {
        static thread_local WatchCalls* watch = nullptr;
        return watch;
    }

    WatchCalls* outer_;
    at::Tensor divided_;
    bool all_local_ = true;
    std::vector<Part> parts_;
};

using EntryTable = std::unordered_map<Key, Entry, KeyHash>;

}  // namespace vescale
