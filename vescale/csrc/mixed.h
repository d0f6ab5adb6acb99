// Calls with plain tensors among DTensors, which PyTorch refuses: Python may answer them.

#pragma once

#include "call.h"
#include "python_arguments.h"

namespace vescale {

// Why a call has no key: such calls are these, or may be.
inline constexpr const char* kPlainTensor = "plain tensor";
inline constexpr const char* kUnknownSpec = "spec";
inline constexpr const char* kViewedCopies = "writes to viewed copies";

// Whether a list that may have gaps (the indices of `index`) has a tensor that is no DTensor.
inline bool has_plain_tensor(const c10::IValue& value) {
    if (!value.isList()) {
        return false;
    }
    for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor() && item.toTensor().defined() && !item.toTensor().key_set().has(c10::DispatchKey::Python)) {
            return true;
        }
    }
    return false;
}

// (op name, overload name, args, kwargs) -> the result, or NotImplemented; null while nothing is to answer.
inline py::object& mixed_calls() {
    static auto* made = new py::object;  // never destroyed, as DTensorClass
    return *made;
}

inline void answer_mixed_calls(const py::object& function) {
    mixed_calls() = function.is_none() ? py::object() : function;
}

// Whether Python has answered; then the results are on the stack. Called with the lock held.
inline bool run_mixed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    if (!mixed_calls()) {
        return false;
    }
    const auto& schema = op.schema();
    const auto num_arguments = schema.arguments().size();
    py::object result;
    {
        c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
        const auto [args, kwargs] = to_python(schema, torch::jit::last(*stack, num_arguments));
        const py::str name(schema.name()), overload(schema.overload_name());
        result = owned(PyObject_CallFunctionObjArgs(
            mixed_calls().ptr(), name.ptr(), overload.ptr(), args.ptr(), kwargs.ptr(), nullptr));
    }
    if (result.ptr() == Py_NotImplemented) {
        return false;
    }
    torch::jit::drop(*stack, num_arguments);
    const auto& returns = schema.returns();
    if (returns.size() == 1) {
        torch::jit::push(*stack, torch::jit::toIValue(result.ptr(), returns[0].type()));
    } else {
        const auto items = py::reinterpret_borrow<py::sequence>(result);
        for (const auto i : c10::irange(returns.size())) {
            const py::object item = items[i];
            torch::jit::push(*stack, torch::jit::toIValue(item, returns[i].type()));
        }
    }
    return true;
}

}  // namespace vescale
