// The torch function of a parallelized model's mode, for calls that the mode passes through.
//
// Every torch function of a forward comes by. Most are on DTensors alone and have no function registered, or one that does
// something for some placements only: these are called here, without Python. All others go to the mode's own method.

#pragma once

#include "call.h"
#include "specs.h"

#include <cstring>

namespace vescale {

// When a function has to go to Python: the values of `When` in vescale/ops/_registry.py. A function of the call in place of
// one is asked.
enum class When : long { kAlways = 0, kPartial = 1, kNotReplicate = 2, kIndex = 3 };

// What is among the arguments of a call.
struct Operands {
    bool has_dtensor = false;
    bool has_plain = false;  // a plain tensor with dims
    bool is_partial = false;
    bool is_replicate = true;
    bool is_custom = false;
    bool is_unknown = false;

    void add(PyObject* object) {
        if (Py_TYPE(object) == dtensor_class().type) {
            has_dtensor = true;
            const Spec* spec = !has_local(object) ? nullptr : spec_of(object);
            is_unknown |= spec == nullptr;
            is_partial |= spec != nullptr && spec->is_partial;
            is_replicate &= spec != nullptr && spec->is_replicate;
            is_custom |= spec != nullptr && spec->is_custom;
        } else if (THPVariable_Check(object)) {
            const auto& tensor = THPVariable_Unpack(object);
            is_unknown |= tensor.key_set().has(c10::DispatchKey::Python);  // another subclass, maybe of DTensor
            has_plain |= tensor.dim() > 0;
        }
    }

    void add_all(PyObject* object) {
        if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
            for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
                add(PySequence_Fast_GET_ITEM(object, i));
            }
        } else {
            add(object);
        }
    }
};

// Whether an index has slices and numbers only.
inline bool is_basic_index(PyObject* index) {
    const auto is_basic = [](PyObject* item) {
        return PySlice_Check(item) || item == Py_None || item == Py_Ellipsis || PyLong_CheckExact(item);
    };
    if (!PyTuple_CheckExact(index)) {
        return is_basic(index);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(index); ++i) {
        if (!is_basic(PyTuple_GET_ITEM(index, i))) {
            return false;
        }
    }
    return true;
}

// What a function that is asked may look at, as words of a key.
class CallKey {
  public:
    // Whether there is a key: tensors are DTensors or have no dims, and other arguments have types that are compared.
    bool add(PyObject* object) {
        if (object == Py_None) {
            words.push_back(kNone);
        } else if (PyBool_Check(object)) {
            words.append({kBool, static_cast<std::uint64_t>(object == Py_True)});
        } else if (PyLong_CheckExact(object)) {
            int overflow = 0;
            words.append({kInt, static_cast<std::uint64_t>(PyLong_AsLongLongAndOverflow(object, &overflow))});
            return overflow == 0;
        } else if (PyFloat_CheckExact(object)) {
            const double number = PyFloat_AS_DOUBLE(object);
            std::uint64_t word;
            std::memcpy(&word, &number, sizeof word);
            words.append({kFloat, word});
        } else if (PyUnicode_CheckExact(object)) {
            Py_ssize_t length = 0;
            const char* text = PyUnicode_AsUTF8AndSize(object, &length);
            if (text == nullptr) {
                throw python_error();
            }
            words.append({kText, static_cast<std::uint64_t>(length)});
            words.append(text, text + length);
        } else if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) {
            const Nested nested;
            words.append({kItems, static_cast<std::uint64_t>(PySequence_Fast_GET_SIZE(object))});
            for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
                if (!add(PySequence_Fast_GET_ITEM(object, i))) {
                    return false;
                }
            }
        } else if (Py_TYPE(object) == dtensor_class().type) {
            const Spec* spec = !has_local(object) ? nullptr : spec_of(object);
            words.append({kDTensor, reinterpret_cast<std::uint64_t>(spec)});
            return spec != nullptr;
        } else {
            return false;
        }
        return true;
    }

    bool add_call(PyObject* function, PyObject* args, PyObject* kwargs) {
        words.push_back(reinterpret_cast<std::uint64_t>(function));
        if (!add(args)) {
            return false;
        }
        Py_ssize_t position = 0;
        PyObject *name = nullptr, *value = nullptr;
        while (kwargs != nullptr && PyDict_Next(kwargs, &position, &name, &value)) {
            if (!add(name) || !add(value)) {
                return false;
            }
        }
        return true;
    }

    Key words;

  private:
    enum Tag : std::uint64_t { kNone = 1, kBool, kInt, kFloat, kText, kItems, kDTensor };
};

// The answers of functions that are asked once for a kind of call. They hold the function, whose address is in the key: PyTorch
// makes some for one call (those that read attributes).
struct Answers {
    std::unordered_map<Key, std::pair<bool, py::object>, KeyHash> known;
    std::uint64_t epoch = 0;
};

// Whether `asked(function, args, kwargs)`, a pure function of specs and of arguments that are no tensors, says yes.
inline bool is_affirmed(PyObject* asked, PyObject* function, PyObject* args, PyObject* kwargs) {
    static auto* answers = new Answers;
    CallKey key;
    const auto epoch = self().epoch;
    if (!key.add_call(function, args, kwargs)) {
        return true;
    }
    if (answers->epoch != self().epoch || answers->known.size() >= self().max_entries) {
        const auto before = std::exchange(answers->known, {});
        answers->epoch = self().epoch;
    }
    const auto found = answers->known.find(key.words);
    if (found != answers->known.end() && epoch == self().epoch) {
        return found->second.first;
    }
    const auto named = kwargs == nullptr ? py::object(py::dict()) : py::reinterpret_borrow<py::object>(kwargs);
    const bool answer =
        owned(PyObject_CallFunctionObjArgs(asked, function, args, named.ptr(), nullptr)).cast<bool>();
    if (epoch == self().epoch) {  // otherwise the key holds specs that have gone
        answers->known.emplace(std::move(key.words), std::make_pair(answer, py::reinterpret_borrow<py::object>(function)));
    }
    return answer;
}

// Whether a function with this rule has to go to Python. `index`: its second argument, or null.
inline bool is_for(When when, const Operands& operands, PyObject* index) {
    switch (when) {
        case When::kPartial:
            return operands.is_partial;
        case When::kNotReplicate:
            return !operands.is_replicate;
        case When::kIndex:
            return operands.is_custom || index == nullptr || !is_basic_index(index);
        default:
            return true;
    }
}

inline bool goes_to_python(PyObject* function, PyObject* args, PyObject* kwargs, PyObject* table) {
    PyObject* rule = PyDict_GetItemWithError(table, function);
    if (rule == nullptr && PyErr_Occurred()) {
        throw python_error();
    }
    const bool is_asked = rule != nullptr && !PyLong_Check(rule);
    const long when = rule == nullptr || is_asked ? -1 : PyLong_AsLong(rule);
    if (when == static_cast<long>(When::kAlways)) {
        return true;
    }
    Operands operands;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
        operands.add_all(PyTuple_GET_ITEM(args, i));
    }
    if (kwargs != nullptr) {
        Py_ssize_t position = 0;
        PyObject* value = nullptr;
        while (PyDict_Next(kwargs, &position, nullptr, &value)) {
            operands.add_all(value);
        }
    }
    if (operands.is_unknown || (operands.has_dtensor && operands.has_plain)) {
        return true;
    }
    if (operands.has_dtensor && is_asked) {
        return is_affirmed(rule, function, args, kwargs);
    }
    if (!operands.has_dtensor || when < 0) {
        return false;
    }
    return is_for(static_cast<When>(when), operands, PyTuple_GET_SIZE(args) < 2 ? nullptr : PyTuple_GET_ITEM(args, 1));
}

// ``__torch_function__`` of a mode: ``(function, kinds, args, kwargs)``. An object of Python's C interface, because PyTorch calls
// it, and asks for its ``__self__``, for every torch function and every attribute of a tensor.
struct FunctionFilter {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject* mode;  // a weak reference: the mode holds this object
    PyObject* python;  // (mode, function, kinds, args, kwargs) -> result
    PyObject* table;  // what `goes_to_python` reads
};

// The filters of modes, by the mode.
inline std::unordered_map<PyObject*, const FunctionFilter*>& filters() {
    static auto* made = new std::unordered_map<PyObject*, const FunctionFilter*>;
    return *made;
}

inline PyObject* call_filter(PyObject* object, PyObject* const* given, std::size_t num_given, PyObject*) {
    HANDLE_TH_ERRORS
    const auto& filter = *reinterpret_cast<FunctionFilter*>(object);
    const auto num_arguments = PyVectorcall_NARGS(num_given);
    TORCH_CHECK_TYPE(num_arguments >= 2 && num_arguments <= 4, "expected (function, kinds, args, kwargs)");
    static PyObject* nothing = PyTuple_New(0);
    PyObject* args = num_arguments > 2 ? given[2] : nothing;
    PyObject* kwargs = num_arguments > 3 && given[3] != Py_None ? given[3] : nullptr;
    TORCH_CHECK_TYPE(PyTuple_Check(args) && (kwargs == nullptr || PyDict_Check(kwargs)), "expected a tuple and a dictionary");
    if (dtensor_class().type != nullptr && !goes_to_python(given[0], args, kwargs, filter.table)) {
        return PyObject_Call(given[0], args, kwargs);
    }
    const auto mode = owned(PyObject_CallNoArgs(filter.mode));
    return PyObject_CallFunctionObjArgs(
        filter.python, mode.ptr(), given[0], given[1], args, kwargs == nullptr ? Py_None : kwargs, nullptr);
    END_HANDLE_TH_ERRORS
}

// PyTorch checks whose method it calls.
inline PyObject* self_of_filter(PyObject* object, void*) {
    return PyObject_CallNoArgs(reinterpret_cast<FunctionFilter*>(object)->mode);
}

inline void free_filter(PyObject* object) {
    auto* filter = reinterpret_cast<FunctionFilter*>(object);
    auto* type = Py_TYPE(object);
    for (auto found = filters().begin(); found != filters().end(); ++found) {
        if (found->second == filter) {
            filters().erase(found);
            break;
        }
    }
    Py_CLEAR(filter->mode);
    Py_CLEAR(filter->python);
    Py_CLEAR(filter->table);
    type->tp_free(object);
    Py_DECREF(type);
}

inline PyTypeObject* filter_type() {
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(FunctionFilter, call), READONLY, nullptr}, {}};
    static PyGetSetDef properties[] = {{"__self__", self_of_filter, nullptr, nullptr, nullptr}, {}};
    static PyType_Slot slots[] = {
        {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
        {Py_tp_dealloc, reinterpret_cast<void*>(free_filter)},
        {Py_tp_members, members},
        {Py_tp_getset, properties},
        {0, nullptr}};
    static PyType_Spec spec = {
        "vescale.csrc._dispatch.FunctionFilter", sizeof(FunctionFilter), 0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    static auto* made = reinterpret_cast<PyTypeObject*>(owned(PyType_FromSpec(&spec)).release().ptr());
    return made;
}

// `mode`: a weak reference.
inline py::object make_filter(const py::object& mode, const py::object& python, const py::dict& table) {
    auto* type = filter_type();
    auto made = owned(type->tp_alloc(type, 0));
    auto& filter = *reinterpret_cast<FunctionFilter*>(made.ptr());
    filter.call = call_filter;
    filter.mode = mode.inc_ref().ptr();
    filter.python = python.inc_ref().ptr();
    filter.table = table.inc_ref().ptr();
    filters()[owned(PyObject_CallNoArgs(mode.ptr())).ptr()] = &filter;
    return made;
}

}  // namespace vescale
