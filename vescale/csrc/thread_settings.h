// Settings of the process and of a thread that decide what a forward does.

#pragma once

#include "interpreter.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/tensor/python_tensor.h>

namespace vescale {

// (gradients, inference mode, default dtype, autocast's cache, (autocast on the CPU, its dtype), the same on GPUs)
inline py::tuple thread_settings() {
    const auto dtype = [](at::ScalarType type) {
        return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
    };
    const auto autocast = [&](at::DeviceType device) {
        return py::make_tuple(at::autocast::is_autocast_enabled(device), dtype(at::autocast::get_autocast_dtype(device)));
    };
    return py::make_tuple(
        at::GradMode::is_enabled(), c10::InferenceMode::is_enabled(), dtype(torch::tensors::get_default_scalar_type()),
        at::autocast::is_autocast_cache_enabled(), autocast(at::kCPU), autocast(at::kCUDA));
}

}  // namespace vescale
