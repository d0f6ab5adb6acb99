// Call sites of static forwards whose arguments other than tensors may differ between steps: they are compared with those of
// the last calls, and Python, which knows more of them, is asked about others.
//
// What is compared is what vescale/static/_checked_calls.py describes: sizes of tensors, values of numbers and texts (of
// fractions whether they are 0 or 1), items of containers, and of other objects which they are.

#pragma once

#include "vectorcall.h"

#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace vescale {

// The function of a call and its arguments, one part after the other.
class CallDescription {
  public:
    // False: another call that is described alike could be another one.
    bool describe(PyObject* const* given, Py_ssize_t num_given, PyObject* names) {
        parts_.clear();
        if (!add_function(given[0])) {
            return false;
        }
        const auto num_named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
        for (Py_ssize_t i = 1; i < num_given + num_named; ++i) {
            if (i >= num_given && !add_value(PyTuple_GET_ITEM(names, i - num_given))) {
                return false;
            }
            if (!add_value(given[i])) {
                return false;
            }
        }
        return true;
    }

    bool operator==(const CallDescription& other) const {
        return std::equal(parts_.begin(), parts_.end(), other.parts_.begin(), other.parts_.end());
    }

    // One that is kept owns what it names.
    void hold() const {
        for (const auto& part : parts_) {
            Py_XINCREF(part.object);
        }
    }

    void release() {
        for (const auto& part : std::exchange(parts_, {})) {
            Py_XDECREF(part.object);
        }
    }

    int traverse(visitproc visit, void* arg) const {
        for (const auto& part : parts_) {
            Py_VISIT(part.object);
        }
        return 0;
    }

  private:
    enum class Kind : int { kObject, kInt, kFloat, kItems, kTensor, kSize };

    struct Part {
        Kind kind;
        PyObject* object;
        std::int64_t number;

        bool operator==(const Part& other) const {
            return kind == other.kind && number == other.number && (object == other.object || is_same_text(object, other.object));
        }
    };

    static bool is_same_text(PyObject* one, PyObject* other) {
        const bool are_texts = one != nullptr && other != nullptr && PyUnicode_CheckExact(one) && PyUnicode_CheckExact(other);
        return are_texts && PyUnicode_Compare(one, other) == 0;
    }

    void add(Kind kind, PyObject* object, std::int64_t number = 0) { parts_.push_back({kind, object, number}); }

    // Methods of tensors by what they are, and the sizes of their tensor.
    bool add_function(PyObject* function) {
        PyObject* owner = nullptr;
        if (PyCFunction_CheckExact(function)) {
            auto* known = reinterpret_cast<PyCFunctionObject*>(function);
            owner = known->m_self;
            add(Kind::kObject, nullptr, reinterpret_cast<std::intptr_t>(known->m_ml));
        } else if (PyMethod_Check(function)) {
            owner = PyMethod_GET_SELF(function);
            add(Kind::kObject, PyMethod_GET_FUNCTION(function));
        } else {
            return add_value(function);
        }
        return owner == nullptr || add_value(owner);
    }

    bool add_value(PyObject* value) {
        if (PyLong_CheckExact(value)) {
            int overflow = 0;
            add(Kind::kInt, nullptr, PyLong_AsLongLongAndOverflow(value, &overflow));
            return overflow == 0;
        }
        if (THPVariable_Check(value)) {
            return add_sizes(THPVariable_Unpack(value), Py_TYPE(value));
        }
        if (PyFloat_CheckExact(value)) {
            const double number = PyFloat_AS_DOUBLE(value);
            add(Kind::kFloat, nullptr, number == 0 ? 0 : number == 1 ? 1 : 2);
            return true;
        }
        if (PyTuple_CheckExact(value) || PyList_CheckExact(value) || Py_TYPE(value) == &THPSizeType) {
            return add_items(Py_TYPE(value), PySequence_Fast_ITEMS(value), PySequence_Fast_GET_SIZE(value));
        }
        if (PySlice_Check(value)) {
            auto* slice = reinterpret_cast<PySliceObject*>(value);
            PyObject* bounds[] = {slice->start, slice->stop, slice->step};
            return add_items(&PySlice_Type, bounds, 3);
        }
        add(Kind::kObject, value);
        const bool is_equal_to_itself_only = Py_TYPE(value)->tp_hash == PyBaseObject_Type.tp_hash;
        return is_equal_to_itself_only || PyBool_Check(value) || PyUnicode_CheckExact(value);
    }

    bool add_items(PyTypeObject* type, PyObject* const* items, Py_ssize_t count) {
        add(Kind::kItems, reinterpret_cast<PyObject*>(type), count);
        return std::all_of(items, items + count, [this](PyObject* item) { return add_value(item); });
    }

    bool add_sizes(const at::Tensor& tensor, PyTypeObject* type) {
        if (tensor.is_nested() || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
            return false;
        }
        add(Kind::kTensor, reinterpret_cast<PyObject*>(type), tensor.dim());
        for (const auto size : tensor.sizes()) {
            add(Kind::kSize, nullptr, size);
        }
        return true;
    }

    std::vector<Part> parts_;
};

// `CheckedCall(callee, check)`: a function (f, *args, **kwargs) that runs `callee`, or `f` if that is None, with the arguments,
// after `check(f, args, kwargs)` has accepted them: raised no error, now or for one of the last calls that are alike.
struct CheckedCall {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject* callee;
    PyObject* check;
    std::array<CallDescription, 4> known;  // the most recent one first
    CallDescription current;

    static PyObject* vectorcall(PyObject* self, PyObject* const* given, std::size_t num_given, PyObject* names) {
        HANDLE_TH_ERRORS
        return reinterpret_cast<CheckedCall*>(self)->run(given, PyVectorcall_NARGS(num_given), names);
        END_HANDLE_TH_ERRORS
    }

    PyObject* run(PyObject* const* given, Py_ssize_t num_given, PyObject* names) {
        TORCH_CHECK_TYPE(num_given > 0, "expected a function");
        const bool is_described = current.describe(given, num_given, names);
        if (!is_described || !(current == known[0] || was_checked())) {
            require(given, num_given, names);
        }
        PyObject* called = callee == Py_None ? given[0] : callee;
        return PyObject_Vectorcall(called, given + 1, static_cast<std::size_t>(num_given - 1), names);
    }

    // Moves what is found to the front.
    bool was_checked() {
        const auto found = std::find(known.begin(), known.end(), current);
        std::rotate(known.begin(), found, found == known.end() ? found : found + 1);
        return found != known.end();
    }

    void require(PyObject* const* given, Py_ssize_t num_given, PyObject* names) {
        const auto [args, kwargs] = packed_arguments(given + 1, num_given - 1, names);
        owned(PyObject_CallFunctionObjArgs(check, given[0], args.ptr(), kwargs.ptr(), nullptr));
        if (current.describe(given, num_given, names)) {  // again: the check may have run this very site
            std::rotate(known.begin(), known.end() - 1, known.end());
            std::swap(known[0], current);
            known[0].hold();
            current.release();
        }
    }

    static PyObject* make(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
        HANDLE_TH_ERRORS
        PyObject *callee, *check;
        static const char* keywords[] = {"callee", "check", nullptr};
        if (PyArg_ParseTupleAndKeywords(args, kwargs, "OO", const_cast<char**>(keywords), &callee, &check) == 0) {
            return nullptr;
        }
        const auto made = owned(type->tp_alloc(type, 0));
        auto* self = reinterpret_cast<CheckedCall*>(made.ptr());
        self->call = vectorcall;
        self->callee = Py_NewRef(callee);
        self->check = Py_NewRef(check);
        new (&self->known) std::array<CallDescription, 4>;
        new (&self->current) CallDescription;
        return made.inc_ref().ptr();
        END_HANDLE_TH_ERRORS
    }

    static int clear(PyObject* object) {
        auto* self = reinterpret_cast<CheckedCall*>(object);
        Py_CLEAR(self->callee);
        Py_CLEAR(self->check);
        for (auto& one : self->known) {
            one.release();
        }
        return 0;
    }

    static int traverse(PyObject* object, visitproc visit, void* arg) {
        auto* self = reinterpret_cast<CheckedCall*>(object);
        Py_VISIT(Py_TYPE(object));
        Py_VISIT(self->callee);
        Py_VISIT(self->check);
        for (const auto& one : self->known) {
            if (const int found = one.traverse(visit, arg)) {
                return found;
            }
        }
        return 0;
    }

    static void dealloc(PyObject* object) {
        auto* self = reinterpret_cast<CheckedCall*>(object);
        PyTypeObject* type = Py_TYPE(object);
        PyObject_GC_UnTrack(object);
        clear(object);
        std::destroy_at(&self->known);
        std::destroy_at(&self->current);
        type->tp_free(object);
        Py_DECREF(type);
    }

    static py::object type() { return vectorcall_type<CheckedCall>("vescale.csrc._dispatch.CheckedCall"); }
};

}  // namespace vescale
