// Which module of a model made an autograd node, by the sequence number of the node.

#pragma once

#include "interpreter.h"

#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace vescale {

// As `ModuleTimeline` in vescale/runtime/_timeline.py. Used with the interpreter's lock held.
struct Timeline {
    std::size_t max_length;
    std::vector<std::uint64_t> numbers;
    std::vector<py::object> paths;  // None: outside of the model

    // From now on this thread runs the module at `path`.
    void mark(PyObject* path) {
        const auto number = at::sequence_number::peek();
        if (!numbers.empty() && numbers.back() == number) {
            paths.back() = py::reinterpret_borrow<py::object>(path);
            return;
        }
        numbers.push_back(number);
        paths.push_back(py::reinterpret_borrow<py::object>(path));
        if (numbers.size() > max_length) {
            const auto half = static_cast<std::ptrdiff_t>(max_length / 2);
            numbers.erase(numbers.begin(), numbers.begin() + half);
            paths.erase(paths.begin(), paths.begin() + half);
        }
    }

    py::object path_of(std::uint64_t number) const {
        const auto after = std::upper_bound(numbers.begin(), numbers.end(), number);
        if (after == numbers.begin()) {
            return py::none();
        }
        return paths[static_cast<std::size_t>(after - numbers.begin()) - 1];
    }
};

}  // namespace vescale
