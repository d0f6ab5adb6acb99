// A number for nested tuples, lists, dictionaries, strings, numbers and tensors of the host's memory.

#pragma once

#include "interpreter.h"
#include "tensor_memory.h"

#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <cstring>

namespace vescale {

// 48 bits. Of a tensor: shape, dtype, and of one in the host's memory a few elements.
class ValueDigest {
  public:
    // Strings in containers count if `has_nested_strings`.
    explicit ValueDigest(bool has_nested_strings) : has_nested_strings_(has_nested_strings) {}

    std::uint64_t value() const { return (state_ ^ state_ >> 48) & ((std::uint64_t{1} << 48) - 1); }

    // False where a value is of another kind, or nested more deeply; the number has no meaning then.
    bool add(PyObject* value, int depth) {
        if (value == Py_None || PyBool_Check(value)) {
            word(value == Py_None ? 1 : value == Py_True ? 2 : 3);
            return true;
        }
        if (PyLong_CheckExact(value)) {
            int overflow = 0;
            const auto number = PyLong_AsLongLongAndOverflow(value, &overflow);
            word(4);
            word(static_cast<std::uint64_t>(number));
            return overflow == 0;
        }
        if (PyFloat_CheckExact(value)) {
            const double number = PyFloat_AS_DOUBLE(value);
            word(5);
            bytes(&number, sizeof number);
            return true;
        }
        if (PyUnicode_CheckExact(value)) {
            return depth != 0 && !has_nested_strings_ ? true : text(value);
        }
        if (depth == kMaxDepth) {
            return false;
        }
        if (PyTuple_Check(value) || PyList_CheckExact(value)) {
            word(6);
            for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
                if (!add(PySequence_Fast_GET_ITEM(value, i), depth + 1)) {
                    return false;
                }
            }
            word(7);
            return true;
        }
        if (PyDict_CheckExact(value)) {
            word(8);
            PyObject *key, *item;
            for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item) != 0;) {
                if (!add(key, 0) || !add(item, depth + 1)) {
                    return false;
                }
            }
            word(9);
            return true;
        }
        return THPVariable_CheckExact(value) && tensor(THPVariable_Unpack(value));
    }

  private:
    static constexpr int kMaxDepth = 16;
    static constexpr std::int64_t kSamples = 8;

    void word(std::uint64_t word) {
        state_ = (state_ ^ word) * 0xff51afd7ed558ccdULL;
        state_ ^= state_ >> 32;
    }

    void bytes(const void* from, std::size_t size) {
        for (std::size_t at = 0; at < size; at += sizeof(std::uint64_t)) {
            std::uint64_t next = 0;
            std::memcpy(&next, static_cast<const char*>(from) + at, std::min(sizeof next, size - at));
            word(next);
        }
    }

    bool text(PyObject* value) {
        Py_ssize_t size = 0;
        const char* utf8 = PyUnicode_AsUTF8AndSize(value, &size);
        if (utf8 == nullptr) {
            PyErr_Clear();
            return false;
        }
        word(10 + static_cast<std::uint64_t>(size));
        bytes(utf8, static_cast<std::size_t>(size));
        return true;
    }

    bool tensor(const at::Tensor& x) {
        if (!x.defined() || x.key_set().has(c10::DispatchKey::Python) || x.layout() != at::kStrided) {
            return false;
        }
        word(static_cast<std::uint64_t>(x.scalar_type()) << 32 | static_cast<std::uint64_t>(x.dim()));
        for (const auto size : x.sizes()) {
            word(static_cast<std::uint64_t>(size));
        }
        if (x.is_cpu() && x.numel() != 0 && has_memory(x) && x.is_contiguous() && !x.is_conj() && !x.is_neg()) {
            const auto width = static_cast<std::size_t>(x.element_size());
            const auto* first = static_cast<const char*>(x.const_data_ptr());
            const auto stride = std::max<std::int64_t>(x.numel() / kSamples, 1);
            for (std::int64_t i = 0, left = kSamples; i < x.numel() && left != 0; i += stride, --left) {
                bytes(first + static_cast<std::size_t>(i) * width, width);
            }
        }
        return true;
    }

    std::uint64_t state_ = 0x9e3779b97f4a7c15ULL;
    bool has_nested_strings_;
};

}  // namespace vescale
