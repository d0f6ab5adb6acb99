// Arguments of ops as Python objects.

#pragma once

#include "interpreter.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <utility>

namespace vescale {

using c10::IValue;

inline py::object to_python(const c10::Argument& argument, const IValue& value) {
    if (value.isInt()) {
        const auto type = argument.real_type();
        const auto kind = type->kind() == c10::TypeKind::OptionalType
            ? type->castRaw<c10::OptionalType>()->getElementType()->kind()
            : type->kind();
        PyObject* made = kind == c10::TypeKind::ScalarTypeType
            ? reinterpret_cast<PyObject*>(torch::getTHPDtype(value.toScalarType()))
            : kind == c10::TypeKind::LayoutType ? reinterpret_cast<PyObject*>(torch::getTHPLayout(value.toLayout()))
            : kind == c10::TypeKind::MemoryFormatType ? torch::utils::getTHPMemoryFormat(value.toMemoryFormat())
                                                      : nullptr;
        if (made != nullptr) {
            return py::reinterpret_borrow<py::object>(made);
        }
    }
    return torch::jit::toPyObject(value);
}

// The arguments as Python passes them: trailing defaults are left out, as PyTorch's own path does.
inline std::pair<py::tuple, py::dict> to_python(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments) {
    const auto& declared = schema.arguments();
    std::size_t num_positional = 0;
    while (num_positional < declared.size() && !declared[num_positional].kwarg_only()) {
        num_positional += 1;
    }
    const auto is_default = [&](std::size_t i) {
        return declared[i].default_value().has_value() && *declared[i].default_value() == arguments[i];
    };
    py::dict kwargs;
    for (auto i = num_positional; i < declared.size(); ++i) {
        if (!is_default(i)) {
            kwargs[declared[i].name().c_str()] = to_python(declared[i], arguments[i]);
        }
    }
    while (num_positional > 0 && is_default(num_positional - 1)) {
        num_positional -= 1;
    }
    py::tuple args(num_positional);
    for (const auto i : c10::irange(num_positional)) {
        args[i] = to_python(declared[i], arguments[i]);
    }
    return {std::move(args), std::move(kwargs)};
}

}  // namespace vescale
