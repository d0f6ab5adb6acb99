// Settings of the process and of a thread that decide what a forward does.

#pragma once

#include "interpreter.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/tensor/python_tensor.h>

#include <array>
#include <cstdint>

namespace vescale {

// (gradients, inference mode, default dtype, autocast's cache, autocast on the CPU, its dtype, the same on GPUs)
inline std::array<std::int64_t, 8> thread_setting_numbers() {
    const auto autocast = [](at::DeviceType device) { return at::autocast::is_autocast_enabled(device); };
    const auto dtype = [](at::ScalarType type) { return static_cast<std::int64_t>(type); };
    return {
        at::GradMode::is_enabled(), c10::InferenceMode::is_enabled(), dtype(torch::tensors::get_default_scalar_type()),
        at::autocast::is_autocast_cache_enabled(), autocast(at::kCPU), dtype(at::autocast::get_autocast_dtype(at::kCPU)),
        autocast(at::kCUDA), dtype(at::autocast::get_autocast_dtype(at::kCUDA))};
}

// The same, for Python; those of autocast as pairs.
inline py::tuple thread_settings() {
    const auto found = thread_setting_numbers();
    const auto flag = [&](std::size_t i) { return found[i] != 0; };
    const auto dtype = [&](std::size_t i) {
        auto* type = torch::getTHPDtype(static_cast<at::ScalarType>(found[i]));
        return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
    };
    return py::make_tuple(
        flag(0), flag(1), dtype(2), flag(3), py::make_tuple(flag(4), dtype(5)), py::make_tuple(flag(6), dtype(7)));
}

}  // namespace vescale
