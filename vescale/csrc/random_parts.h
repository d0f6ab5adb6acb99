// One rank's part of a random fill on a CPU: the words of its elements are taken out of the generator's stream, and the
// native op computes the elements from them.
//
// A native op reads one word after another, `words` for each element, or for each 16 elements together (normal_). Long runs
// of elements are filled where they are, by a generator that starts at their first word. The words of short runs are put
// one behind the other into the state of a generator, from which the native op then fills all of these elements with one
// call: the elements between them cost 0.2 ns a word, and are not generated.

#pragma once

#include "mt19937.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/TensorImpl.h>

#include <array>
#include <cstdint>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace vescale {

// Consecutive indices of a dim, [start, start + length).
struct IndexRun {
    std::int64_t start;
    std::int64_t length;
};

// A dim of the whole tensor, in memory order: elements from one index to the next, and the indices that the rank owns.
struct OwnedDim {
    std::int64_t row;
    std::vector<IndexRun> runs;
};

// A rank's part of a fill, and how the op draws. Elements are numbered in memory order, on this rank and in the whole tensor.
struct Part {
    bool is_whole = false;                     // the native op fills the local tensor from the generator itself
    int words = 1;                             // for each element
    int unit = 1;                              // elements that are computed together
    std::int64_t numel = 0;                    // of the whole tensor
    std::int64_t tail_word = -1;               // of the last `unit` elements, if these are computed again; else -1
    std::uint64_t final_word = 0;              // words that the whole fill draws
    std::vector<std::vector<OwnedDim>> boxes;  // one after the other, in memory order on the rank
};

// Fills a contiguous tensor from a generator.
using NativeFill = std::function<void(const at::Tensor&, const at::Generator&)>;

// Exponents of the generator's characteristic polynomial, for jumps; set once, by Python.
inline std::vector<std::int32_t>& characteristic_exponents() {
    static auto* made = new std::vector<std::int32_t>;
    return *made;
}

// A position among the words of a generator.
class Stream {
  public:
    explicit Stream(const at::mt19937_data_pod& start)
        : data(start), first_(static_cast<std::uint64_t>(mt19937::kWords + 1 - start.left_)) {}

    // The state after `word` words from the start; not before a word that has been taken.
    void seek(std::uint64_t word) {
        if (word == 0) {
            return;
        }
        // A block is refilled by the word that needs it, not by the one that empties it.
        to_block((first_ + word - 1) / mt19937::kWords);
        const auto position = static_cast<int>((first_ + word - 1) % mt19937::kWords) + 1;
        data.left_ = mt19937::kWords + 1 - position;
        data.next_ = static_cast<std::uint32_t>(position);
    }

    // Copies `count` words.
    void take(std::uint64_t word, std::uint64_t count, std::uint32_t* out) {
        while (count > 0) {
            to_block((first_ + word) / mt19937::kWords);
            const auto position = (first_ + word) % mt19937::kWords;
            const auto here = std::min<std::uint64_t>(count, mt19937::kWords - position);
            std::memcpy(out, data.state_.data() + position, here * sizeof(std::uint32_t));
            out += here;
            word += here;
            count -= here;
        }
    }

    // Continues at the state of a generator that has drawn up to `word`.
    void resume(const at::mt19937_data_pod& reached, std::uint64_t word) {
        data = reached;
        block_ = (first_ + word - 1) / mt19937::kWords;
    }

    at::mt19937_data_pod data;

  private:
    // From so many blocks on, a jump costs less than computing them.
    static constexpr std::uint64_t kJumpFrom = 6000;
    static constexpr std::size_t kJumps = 64;
    using Residue = std::array<std::uint64_t, mt19937::kLimbs>;

    void to_block(std::uint64_t block) {
        const auto count = block - block_;
        block_ = block;
        if (count < kJumpFrom) {
            return mt19937::advance_by_twists(data.state_.data(), count);
        }
        mt19937::advance_by_twists(data.state_.data(), 1);  // bits of a seeded block are outside of the recurrence
        mt19937::advance_by_residue(jump((count - 1) * mt19937::kWords).data(), data.state_.data());
    }

    static Residue jump(std::uint64_t distance) {
        static auto* lock = new std::mutex;
        static auto* known = new std::unordered_map<std::uint64_t, Residue>;
        {
            const std::lock_guard<std::mutex> guard(*lock);
            const auto found = known->find(distance);
            if (found != known->end()) {
                return found->second;
            }
        }
        Residue made;
        const auto& exponents = characteristic_exponents();
        mt19937::power_of_t(distance, exponents.data(), static_cast<std::int32_t>(exponents.size()), made.data());
        const std::lock_guard<std::mutex> guard(*lock);
        if (known->size() >= kJumps) {
            known->clear();
        }
        return known->emplace(distance, made).first->second;
    }

    std::uint64_t first_;      // position of the start in its block
    std::uint64_t block_ = 0;  // blocks after the start's
};

// The elements [offset, offset + count) of a tensor without holes, as a tensor of one dim over the same memory.
inline at::Tensor elements_of(const at::Tensor& tensor, std::int64_t offset, std::int64_t count) {
    auto slice = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = slice.unsafeGetTensorImpl();
    impl->set_storage_offset(tensor.storage_offset() + offset);
    impl->set_sizes_contiguous({count});
    return slice;
}

// Draws a part into a local tensor that has its elements in memory order, without holes.
class PartFill {
  public:
    PartFill(const Part& part, const at::Tensor& local, Stream& stream, const NativeFill& native)
        : part_(part),
          local_(local),
          stream_(stream),
          native_(native),
          capacity_(mt19937::kWords / (part.words * part.unit) * part.unit) {}

    void run() {
        for (const auto& box : part_.boxes) {
            descend(box, 0, 0);
        }
        flush();
        if (!has_called_) {  // a rank without elements raises what the others do
            native_(at::empty({1}, local_.options()), draws_);
        }
    }

  private:
    static constexpr std::int64_t kLongRun = 1024;  // elements that are filled where they are

    // A copy from the scratch memory of units: elements [from, from + count) to the local element `to`.
    struct Copy {
        std::int64_t from;
        std::int64_t count;
        std::int64_t to;
    };

    // The generator from which native ops draw; making one takes as long as a small fill.
    static at::Generator& own_generator() {
        static thread_local at::Generator made = at::detail::createCPUGenerator(0);
        return made;
    }

    at::CPUGeneratorImpl& engine() { return *at::check_generator<at::CPUGeneratorImpl>(draws_); }

    void descend(const std::vector<OwnedDim>& dims, std::size_t depth, std::int64_t base) {
        const auto& dim = dims[depth];
        for (const auto& run : dim.runs) {
            if (depth + 1 == dims.size()) {
                own(base + run.start * dim.row, run.length * dim.row);
                continue;
            }
            for (std::int64_t i = run.start; i < run.start + run.length; ++i) {
                descend(dims, depth + 1, base + i * dim.row);
            }
        }
    }

    // The rank owns elements [start, start + count), which follow on what it owned so far.
    void own(std::int64_t start, std::int64_t count) {
        const std::int64_t tail = part_.tail_word < 0 ? part_.numel : part_.numel - part_.unit;
        const std::int64_t stop = start + count;
        const std::int64_t main_stop = std::min(stop, tail);
        const auto unit = part_.unit;
        if (start < main_stop) {
            const std::int64_t first = (start + unit - 1) / unit * unit;  // whole units
            const std::int64_t last = main_stop / unit * unit;
            if (last - first >= kLongRun) {
                own_units(start, first);
                flush();
                fill_in_place(first, last - first);
                own_units(last, main_stop);
            } else {
                own_units(start, main_stop);
            }
        }
        if (stop > tail) {
            const std::int64_t from = std::max(start, tail);
            add(static_cast<std::uint64_t>(part_.tail_word), from - tail, stop - from);
        }
    }

    void own_units(std::int64_t start, std::int64_t stop) {
        const auto unit = part_.unit;
        if (unit == 1) {  // as many as fit at once
            while (start < stop) {
                const auto count = std::min(stop - start, capacity_ - pending_);
                add(static_cast<std::uint64_t>(start) * part_.words, 0, count);
                start += count;
            }
            return;
        }
        while (start < stop) {
            const std::int64_t first = start / unit * unit;
            const std::int64_t end = std::min(first + unit, stop);
            add(static_cast<std::uint64_t>(first) * part_.words, start - first, end - start);
            start = end;
        }
    }

    // Elements [from, from + count) of the unit that is computed from `word` on (of the units from there on, if a unit is
    // one element).
    void add(std::uint64_t word, std::int64_t from, std::int64_t count) {
        const auto unit = part_.unit;
        const std::uint64_t num_words = static_cast<std::uint64_t>(unit == 1 ? count : unit) * part_.words;
        if (unit > 1 && has_last_ && word == last_word_) {  // the unit before, again: the stream is past its words
            if (pending_ == 0) {
                std::copy_n(last_words_.begin(), num_words, gathered_.state_.begin());
                pending_ = unit;
            }
        } else {
            stream_.take(word, num_words, gathered_.state_.data() + pending_ * part_.words);
            pending_ += unit == 1 ? count : unit;
            if (unit > 1) {
                std::copy_n(gathered_.state_.begin() + (pending_ - unit) * part_.words, num_words, last_words_.begin());
                has_last_ = true;
                last_word_ = word;
            }
        }
        if (unit > 1) {
            copies_.push_back({pending_ - unit + from, count, done_});
        }
        done_ += count;
        if (pending_ == capacity_) {
            flush();
        }
    }

    // Computes what is pending, with one call.
    void flush() {
        if (pending_ == 0) {
            return;
        }
        gathered_.left_ = mt19937::kWords + 1;  // no word of the block is drawn
        gathered_.next_ = 0;
        gathered_.seeded_ = true;
        set_engine(gathered_);
        has_called_ = true;
        if (part_.unit == 1) {
            native_(elements_of(local_, done_ - pending_, pending_), draws_);
        } else {
            if (!scratch_.defined()) {
                scratch_ = at::empty({capacity_}, local_.options());
            }
            native_(elements_of(scratch_, 0, pending_), draws_);
            const auto size = static_cast<std::int64_t>(local_.element_size());
            auto* to = static_cast<char*>(local_.data_ptr());
            const auto* from = static_cast<const char*>(scratch_.data_ptr());
            for (const auto& copy : copies_) {
                std::memcpy(to + copy.to * size, from + copy.from * size, static_cast<std::size_t>(copy.count * size));
            }
            copies_.clear();
        }
        pending_ = 0;
    }

    void fill_in_place(std::int64_t start, std::int64_t count) {
        const auto word = static_cast<std::uint64_t>(start) * part_.words;
        stream_.seek(word);
        set_engine(stream_.data);
        has_called_ = true;
        native_(elements_of(local_, done_, count), draws_);
        stream_.resume(engine().engine().data(), word + static_cast<std::uint64_t>(count) * part_.words);
        done_ += count;
    }

    void set_engine(const at::mt19937_data_pod& data) {
        static thread_local at::mt19937 made;
        made.set_data(data);
        engine().set_engine(made);
    }

    const Part& part_;
    const at::Tensor& local_;
    Stream& stream_;
    const NativeFill& native_;
    std::int64_t capacity_;  // elements whose words fit into one block
    at::Generator& draws_ = own_generator();
    at::Tensor scratch_;
    at::mt19937_data_pod gathered_{};
    std::int64_t pending_ = 0;  // elements with gathered words
    std::int64_t done_ = 0;     // elements of the rank that are generated or pending
    bool has_called_ = false;
    bool has_last_ = false;
    std::uint64_t last_word_ = 0;
    std::array<std::uint32_t, 32> last_words_{};
    std::vector<Copy> copies_;
};

// Fills `local`, and leaves the generator as the fill of the whole tensor does; unchanged if the op raises.
inline void fill_part(const Part& part, const at::Tensor& local, const at::Generator& generator, const NativeFill& native) {
    if (part.is_whole) {
        return native(local, generator);
    }
    auto& impl = *at::check_generator<at::CPUGeneratorImpl>(generator);
    const std::lock_guard<std::mutex> guard(impl.mutex_);
    at::mt19937 engine = impl.engine();
    Stream stream(engine.data());
    PartFill(part, local, stream, native).run();
    stream.seek(part.final_word);
    engine.set_data(stream.data);
    impl.set_engine(engine);
}

}  // namespace vescale
