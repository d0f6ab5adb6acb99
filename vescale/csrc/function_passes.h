// Methods and attributes of DTensors that a model's function mode would pass through, called without going there.
//
// While a mode is on, PyTorch calls it for every method and for every attribute that is read, `x.shape` too, and parses the
// arguments a second time when the mode calls the function: one to three microseconds. These descriptors stand in the class
// DTensor in front of PyTorch's own. Where the model's mode is the only one and would call the function at once, they call
// PyTorch's with torch functions switched off, which is what the mode's call sees. In all other cases they call it as it is.

#pragma once

#include "function_filter.h"
#include "no_torch_function.h"
#include "torch_versions.h"

namespace vescale {

// The filter of this thread's mode; null where there is none, or more than one, or torch functions are not seen anyway.
inline const FunctionFilter* only_filter() {
    using Tls = at::impl::PythonTorchFunctionTLS;
    if (Tls::stack_len() != 1 || dtensor_class().type == nullptr || skips_next<Tls>() ||
        Tls::get_disabled_state() == at::impl::TorchFunctionDisabledState::ALL_DISABLED) {
        return nullptr;
    }
    const auto found = filters().find(Tls::get_stack_at(0)->ptr(c10::impl::getGlobalPyInterpreter()));
    return found == filters().end() ? nullptr : found->second;
}

// Whether the mode would call the function at once. One that a table has to be asked for goes to the mode.
inline bool is_passed(PyObject* function, PyObject* const* args, Py_ssize_t num_args) {
    const auto* filter = only_filter();
    if (filter == nullptr) {
        return false;
    }
    PyObject* rule = PyDict_GetItemWithError(filter->table, function);
    if (rule == nullptr && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    if (rule != nullptr && !PyLong_Check(rule)) {
        return false;
    }
    const long when = rule == nullptr ? -1 : PyLong_AsLong(rule);
    if (when == static_cast<long>(When::kAlways)) {
        return false;
    }
    Operands operands;
    for (Py_ssize_t i = 0; i < num_args; ++i) {
        operands.add_all(args[i]);
    }
    if (operands.is_unknown || !operands.has_dtensor || operands.has_plain) {
        return false;
    }
    return when < 0 || !is_for(static_cast<When>(when), operands, num_args < 2 ? nullptr : args[1]);
}

// What a program has put into the class torch.Tensor in place of `own`, borrowed; null: nothing.
inline PyObject* replacement_of(PyObject* tensor, PyObject* name, PyObject* own) {
    PyObject* found = PyDict_GetItemWithError(reinterpret_cast<PyTypeObject*>(tensor)->tp_dict, name);
    if (found == nullptr) {
        PyErr_Clear();
    }
    return found == own ? nullptr : found;
}

// In place of a method of PyTorch's C++ class. Read from the class, or from an object without a call, it is that method.
struct PassedMethod {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject* method;
    PyObject* function;  // what a mode gets to see
    PyObject* tensor;  // the class torch.Tensor
    PyObject* name;
    binaryfunc subscript;  // of `__getitem__`; null: another method
};

inline PyObject* call_method(PyObject* object, PyObject* const* args, std::size_t num_given, PyObject* names) {
    const auto& passed = *reinterpret_cast<PassedMethod*>(object);
    const auto num_args = PyVectorcall_NARGS(num_given);
    const auto num_named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    const auto call = [&] {
        return passed.subscript != nullptr && num_args == 2 && num_named == 0 && THPVariable_Check(args[0])
            ? passed.subscript(args[0], args[1])
                                                                              : PyObject_Vectorcall(passed.method, args, num_given, names);
    };
    HANDLE_TH_ERRORS
    if (PyObject* other = replacement_of(passed.tensor, passed.name, passed.method); other != nullptr && num_args > 0) {
        const auto held = py::reinterpret_borrow<py::object>(other);
        const auto get = Py_TYPE(other)->tp_descr_get;
        const auto bound = get == nullptr ? held : owned(get(other, args[0], reinterpret_cast<PyObject*>(Py_TYPE(args[0]))));
        return PyObject_Vectorcall(bound.ptr(), args + (num_args > 0), num_args - 1, names);
    }
    if (num_args > 0 && is_passed(passed.function, args, num_args + num_named)) {
        const NoTorchFunction guard;
        return call();
    }
    return call();
    END_HANDLE_TH_ERRORS
}

inline PyObject* get_method(PyObject* object, PyObject* owner, PyObject* type) {
    const auto& passed = *reinterpret_cast<PassedMethod*>(object);
    PyObject* other = replacement_of(passed.tensor, passed.name, passed.method);
    PyObject* method = other == nullptr ? passed.method : other;
    if (Py_TYPE(method)->tp_descr_get == nullptr) {
        return Py_NewRef(method);
    }
    return owner == nullptr ? Py_NewRef(method) : Py_TYPE(method)->tp_descr_get(method, owner, type);
}

// In place of an attribute.
struct PassedAttribute {
    PyObject_HEAD
    PyObject* attribute;
    PyObject* function;
    PyObject* tensor;
    PyObject* name;
};

inline PyObject* get_attribute(PyObject* object, PyObject* owner, PyObject* type) {
    const auto& passed = *reinterpret_cast<PassedAttribute*>(object);
    const auto get = Py_TYPE(passed.attribute)->tp_descr_get;
    if (owner == nullptr) {
        return Py_NewRef(passed.attribute);
    }
    HANDLE_TH_ERRORS
    if (PyObject* other = replacement_of(passed.tensor, passed.name, passed.attribute); other != nullptr) {
        const auto held = py::reinterpret_borrow<py::object>(other);
        const auto read = Py_TYPE(other)->tp_descr_get;
        return read == nullptr ? Py_NewRef(other) : read(other, owner, type);
    }
    if (is_passed(passed.function, &owner, 1)) {
        const NoTorchFunction guard;
        return get(passed.attribute, owner, type);
    }
    return get(passed.attribute, owner, type);
    END_HANDLE_TH_ERRORS
}

inline int set_attribute(PyObject* object, PyObject* owner, PyObject* value) {
    const auto& passed = *reinterpret_cast<PassedAttribute*>(object);
    PyObject* other = replacement_of(passed.tensor, passed.name, passed.attribute);
    PyObject* attribute = other == nullptr || Py_TYPE(other)->tp_descr_set == nullptr ? passed.attribute : other;
    return Py_TYPE(attribute)->tp_descr_set(attribute, owner, value);
}

template <class Passed>
void free_passed(PyObject* object) {
    auto* type = Py_TYPE(object);
    if constexpr (std::is_same_v<Passed, PassedMethod>) {
        Py_CLEAR(reinterpret_cast<PassedMethod*>(object)->method);
    } else {
        Py_CLEAR(reinterpret_cast<PassedAttribute*>(object)->attribute);
    }
    Py_CLEAR(reinterpret_cast<Passed*>(object)->function);
    Py_CLEAR(reinterpret_cast<Passed*>(object)->tensor);
    Py_CLEAR(reinterpret_cast<Passed*>(object)->name);
    type->tp_free(object);
    Py_DECREF(type);
}

inline PyTypeObject* passed_method_type() {
    static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(PassedMethod, call), READONLY, nullptr}, {}};
    static PyType_Slot slots[] = {
        {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
        {Py_tp_descr_get, reinterpret_cast<void*>(get_method)},
        {Py_tp_dealloc, reinterpret_cast<void*>(free_passed<PassedMethod>)},
        {Py_tp_members, members},
        {0, nullptr}};
    static PyType_Spec spec = {
        "vescale.csrc._dispatch.PassedMethod", sizeof(PassedMethod), 0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    static auto* made = reinterpret_cast<PyTypeObject*>(owned(PyType_FromSpec(&spec)).release().ptr());
    return made;
}

inline PyTypeObject* passed_attribute_type() {
    static PyType_Slot slots[] = {
        {Py_tp_descr_get, reinterpret_cast<void*>(get_attribute)},
        {Py_tp_descr_set, reinterpret_cast<void*>(set_attribute)},
        {Py_tp_dealloc, reinterpret_cast<void*>(free_passed<PassedAttribute>)},
        {0, nullptr}};
    static PyType_Spec spec = {
        "vescale.csrc._dispatch.PassedAttribute", sizeof(PassedAttribute), 0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    static auto* made = reinterpret_cast<PyTypeObject*>(owned(PyType_FromSpec(&spec)).release().ptr());
    return made;
}

// `method`: of the class `tensor`; `function`: what a mode sees where it is called.
inline py::object pass_method(const py::object& tensor, const py::object& method, const py::object& function) {
    TORCH_CHECK_TYPE(Py_TYPE(method.ptr())->tp_descr_get != nullptr && PyType_Check(tensor.ptr()), "expected a class and its method");
    auto* type = passed_method_type();
    auto made = owned(type->tp_alloc(type, 0));
    auto& passed = *reinterpret_cast<PassedMethod*>(made.ptr());
    passed.call = call_method;
    passed.method = method.inc_ref().ptr();
    passed.function = function.inc_ref().ptr();
    passed.tensor = tensor.inc_ref().ptr();
    passed.name = py::object(method.attr("__name__")).release().ptr();
    const auto* mapping = reinterpret_cast<PyTypeObject*>(tensor.ptr())->tp_as_mapping;
    const bool is_subscript = owned(PyObject_GetAttrString(tensor.ptr(), "__getitem__")).is(method);
    passed.subscript = is_subscript && mapping != nullptr ? mapping->mp_subscript : nullptr;
    return made;
}

inline py::object pass_attribute(const py::object& tensor, const py::object& attribute, const py::object& function) {
    TORCH_CHECK_TYPE(Py_TYPE(attribute.ptr())->tp_descr_get != nullptr && Py_TYPE(attribute.ptr())->tp_descr_set != nullptr, "expected the descriptor of an attribute");
    auto* type = passed_attribute_type();
    auto made = owned(type->tp_alloc(type, 0));
    auto& passed = *reinterpret_cast<PassedAttribute*>(made.ptr());
    passed.attribute = attribute.inc_ref().ptr();
    passed.function = function.inc_ref().ptr();
    passed.tensor = tensor.inc_ref().ptr();
    passed.name = py::object(attribute.attr("__name__")).release().ptr();
    return made;
}

}  // namespace vescale
