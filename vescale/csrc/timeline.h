// Which module of a model made an autograd node, by the thread that made it and the number that it got there.

#pragma once

#include "interpreter.h"
#include "torch_versions.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

namespace vescale {

// As `ModuleTimeline` in vescale/runtime/_runtime.py, which explains it. Used with the interpreter's lock held.
class Timeline {
  public:
    explicit Timeline(std::size_t max_length) : max_length_(max_length) {}

    // From now on this thread runs the module of `where`; None: it has left the outermost model.
    void mark(PyObject* where) {
        auto& thread = threads_[at::RecordFunction::currentThreadId()];
        const auto number = at::sequence_number::peek();
        auto& open = thread.open;
        if (where == Py_None) {
            close(thread, number);
        } else if (!open.numbers.empty() && open.numbers.back() == number) {
            open.wheres.back() = py::reinterpret_borrow<py::object>(where);
        } else if (open.wheres.empty() || open.wheres.back().ptr() != where) {
            open.numbers.push_back(number);
            open.wheres.push_back(py::reinterpret_borrow<py::object>(where));
        }
    }

    // Of the node that this thread evaluates in backward; None: of no model, or there is no such node.
    py::object of_current_node() const {
        const auto node = torch::autograd::get_current_node();
        return node ? find(node->thread_id(), node->sequence_nr()) : py::none();
    }

    // Of a node, a Python object.
    py::object of_node(const py::object& object) const {
        NodePtr<torch::autograd::Node> node;
        if (torch::autograd::THPCppFunction_Check(object.ptr())) {
            node = reinterpret_cast<torch::autograd::THPCppFunction*>(object.ptr())->cdata;
        } else if (PyObject_IsInstance(object.ptr(), function_base()) == 1) {
            node = node_held_by(reinterpret_cast<THPFunction*>(object.ptr())->cdata);
        }
        return node ? find(node->thread_id(), node->sequence_nr()) : py::none();
    }

    std::size_t length() const { return length_; }

  private:
    // The class of the nodes of Python functions, which is the type of ``ctx`` in their backward.
    static PyObject* function_base() {
        static PyObject* base = py::object(py::module_::import("torch._C").attr("_FunctionBase")).release().ptr();
        return base;
    }

    struct Marks {
        std::vector<std::uint64_t> numbers;
        std::vector<py::object> wheres;

        bool operator==(const Marks& other) const {
            return numbers == other.numbers &&
                std::equal(
                       wheres.begin(), wheres.end(), other.wheres.begin(), other.wheres.end(),
                       [](const py::object& one, const py::object& two) { return one.ptr() == two.ptr(); });
        }

        std::size_t hash() const {
            std::size_t found = numbers.size();
            for (std::size_t i = 0; i < numbers.size(); ++i) {
                found = (found ^ numbers[i] ^ reinterpret_cast<std::size_t>(wheres[i].ptr())) * 0x9e3779b97f4a7c15ULL;
                found ^= found >> 29;
            }
            return found;
        }

        py::object at(std::uint64_t number) const {
            const auto after = std::upper_bound(numbers.begin(), numbers.end(), number);
            return after == numbers.begin() ? py::none() : wheres[static_cast<std::size_t>(after - numbers.begin()) - 1];
        }
    };
    struct Forward {
        std::uint64_t start, end;
        std::shared_ptr<const Marks> marks;  // their numbers count from the start
    };
    struct Thread {
        Marks open;  // of the forward that is running
        std::deque<Forward> forwards;
    };

    void close(Thread& thread, std::uint64_t number) {
        Marks marks = std::exchange(thread.open, {});
        const auto start = marks.numbers.empty() ? number : marks.numbers.front();
        if (start == number) {  // it has made no nodes
            return;
        }
        for (auto& each : marks.numbers) {
            each -= start;
        }
        auto& known = patterns_[marks.hash()];
        if (!known || !(*known == marks)) {  // the first, or one of another with an equal hash, which is not shared any more
            known = std::make_shared<const Marks>(std::move(marks));
            length_ += known->numbers.size();
        }
        thread.forwards.push_back({start, number, known});
        order_.push_back(at::RecordFunction::currentThreadId());
        length_ += 1;
        while (length_ > max_length_ && order_.size() > 1) {
            forget();
        }
    }

    void forget() {
        const auto thread = threads_.find(order_.front());
        order_.pop_front();
        auto marks = std::move(thread->second.forwards.front().marks);
        thread->second.forwards.pop_front();
        length_ -= 1;
        if (marks.use_count() <= 2) {  // this one, and the table's unless it has another one by now
            const auto known = patterns_.find(marks->hash());
            if (known != patterns_.end() && known->second == marks) {
                patterns_.erase(known);
            }
            if (marks.use_count() == 1) {
                length_ -= marks->numbers.size();
            }
        }
        if (thread->second.forwards.empty() && thread->second.open.numbers.empty()) {
            threads_.erase(thread);
        }
    }

    py::object find(std::uint64_t id, std::uint64_t number) const {
        const auto thread = threads_.find(id);
        if (thread == threads_.end()) {
            return py::none();
        }
        const auto& open = thread->second.open;
        if (!open.numbers.empty() && number >= open.numbers.front()) {
            return number == UINT64_MAX ? py::none() : open.at(number);
        }
        const auto& forwards = thread->second.forwards;
        const auto after = std::upper_bound(
            forwards.begin(), forwards.end(), number,
            [](std::uint64_t wanted, const Forward& forward) { return wanted < forward.start; });
        if (after == forwards.begin() || number >= std::prev(after)->end) {
            return py::none();
        }
        return std::prev(after)->marks->at(number - std::prev(after)->start);
    }

    std::size_t max_length_, length_ = 0;
    std::map<std::uint64_t, Thread> threads_;
    std::deque<std::uint64_t> order_;  // threads of the finished forwards, the oldest first
    std::unordered_map<std::size_t, std::shared_ptr<const Marks>> patterns_;
};

}  // namespace vescale
