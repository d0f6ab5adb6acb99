// A rank's row of a board (vescale/agreement/_board.py), in memory that the ranks of a host share.

#pragma once

#include "interpreter.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

namespace vescale {

class BoardRow {
  public:
    // `base`: the cell, of 8 bytes, where the row begins; `places`: of each channel, the cells where the marks begin of the
    // ranks that meet there; `marks`: where marks begin in a row; `text`: where the text does, in bytes, and its length.
    BoardRow(const py::buffer& memory, std::size_t base, std::vector<std::vector<std::size_t>> places, std::size_t marks,
             std::size_t text, std::size_t text_bytes)
        : memory_(memory.request(true)), base_(base), places_(std::move(places)), marks_(marks), text_(text),
          text_bytes_(text_bytes) {
        const auto num_bytes = static_cast<std::size_t>(std::max<Py_ssize_t>(memory_.size, 0) * memory_.itemsize);
        const auto num_cells = num_bytes / sizeof(std::uint64_t);
        const auto is_in = [](std::size_t begin, std::size_t count, std::size_t end) { return begin <= end && count <= end - begin; };
        bool is_sound = PyBuffer_IsContiguous(memory_.view(), 'C') == 1 &&
            reinterpret_cast<std::uintptr_t>(memory_.ptr) % sizeof(std::uint64_t) == 0 && is_in(base, marks, num_cells) &&
            places_.size() <= num_cells && is_in(base + marks, 2 * kMarks * places_.size(), num_cells) &&
            is_in(8 * base, text, num_bytes) && text_bytes < num_bytes && is_in(8 * base + text, text_bytes + 1, num_bytes);
        for (const auto& places : places_) {
            for (const auto place : places) {
                is_sound = is_sound && is_in(place, 2 * kMarks, num_cells);
            }
        }
        TORCH_CHECK_VALUE(is_sound, "a row that is not in the memory");
    }

    // Writes marks and a text. Whether each rank that meets this one on the channel has posted the same marks by now.
    bool post(std::uint64_t number, std::size_t channel, std::uint64_t first, std::uint64_t second, std::uint64_t third,
              const std::string& text) {
        const auto& places = places_.at(channel);
        auto* line = static_cast<char*>(memory_.ptr) + 8 * base_ + text_;
        const auto length = std::min(text.size(), text_bytes_);
        std::memcpy(line, text.data(), length);
        line[length] = '\0';
        const auto low = (number & 0xFFFF) << kDigestBits;
        const std::array<std::uint64_t, kMarks> marks{low | (first & kDigest), low | (second & kDigest), low | (third & kDigest)};
        const auto offset = (number & 1) * marks.size();
        const auto own = base_ + marks_ + 2 * channel * marks.size() + offset;
        for (std::size_t i = 0; i < marks.size(); ++i) {
            cell(own + i).store(marks[i], std::memory_order_release);
        }
        const auto is_same = [&](std::size_t place) {
            for (std::size_t i = 0; i < marks.size(); ++i) {
                if (cell(place + offset + i).load(std::memory_order_acquire) != marks[i]) {
                    return false;
                }
            }
            return true;
        };
        return std::all_of(places.begin(), places.end(), is_same);
    }

  private:
    static constexpr std::size_t kMarks = 3;  // at a time, of two steps that follow one another
    static constexpr unsigned kDigestBits = 48;
    static constexpr std::uint64_t kDigest = (std::uint64_t{1} << kDigestBits) - 1;

    std::atomic_ref<std::uint64_t> cell(std::size_t at) const {
        return std::atomic_ref<std::uint64_t>(static_cast<std::uint64_t*>(memory_.ptr)[at]);
    }

    py::buffer_info memory_;
    std::size_t base_;
    std::vector<std::vector<std::size_t>> places_;
    std::size_t marks_, text_, text_bytes_;
};

}  // namespace vescale
