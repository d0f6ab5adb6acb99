// Ops of the simulated accelerator: the CPU's kernels, in the device's memory.

#include "sim.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

namespace sim {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

struct Range {
    std::size_t low, high;
};

Range bytes_of(const at::Tensor& tensor) {
    if (tensor.numel() == 0) {
        return {0, 0};
    }
    std::int64_t last = tensor.storage_offset();
    for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
        last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    return {tensor.storage_offset() * tensor.itemsize(), (last + 1) * tensor.itemsize()};
}

c10::Storage host_storage(Block& block, std::size_t base, std::size_t size) {
    if (base != 0) {  // a storage within a block
        return c10::Storage(
            c10::Storage::use_byte_size_t(), size, c10::DataPtr(block.memory + base, c10::Device(c10::kCPU)),
            c10::GetCPUAllocator(), /*resizable=*/true);
    }
    if (!block.host.unsafeGetStorageImpl() || block.host.nbytes() != size) {
        block.host = c10::Storage(
            c10::Storage::use_byte_size_t(), size, c10::DataPtr(block.memory, c10::Device(c10::kCPU)),
            c10::GetCPUAllocator(), /*resizable=*/true);
    }
    return block.host;
}

// The same bytes, as a tensor of the CPU. For kernels alone: it must not outlive the op.
at::Tensor on_host(const at::Tensor& tensor) {
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == c10::kStrided, "the simulated device has strided tensors alone, not ", tensor.layout());
    const c10::Storage& storage = impl->storage();
    const auto [block, base] = memory_of(storage.data_ptr());
    TORCH_CHECK(
        bytes_of(tensor).high <= storage.nbytes(), "an op was given a tensor of ", tensor.sizes(), " whose memory is gone: ",
        "it needs ", bytes_of(tensor).high, " bytes of a storage that has ", storage.nbytes());
    c10::Storage host =
        block != nullptr
            ? host_storage(*block, base, storage.nbytes())
            : c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, c10::Device(c10::kCPU)),
                           c10::GetCPUAllocator(), /*resizable=*/true);
    at::Tensor alias =
        at::detail::make_tensor<c10::TensorImpl>(std::move(host), DispatchKeySet(DispatchKey::CPU), impl->dtype());
    c10::TensorImpl* made = alias.unsafeGetTensorImpl();
    made->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
    if (impl->is_wrapped_number()) {
        made->set_wrapped_number(true);
    }
    if (tensor.is_conj()) {
        made->_set_conj(true);
    }
    if (tensor.is_neg()) {
        made->_set_neg(true);
    }
    return alias;
}

void use(Launch& launch, const at::Tensor& tensor, bool writes) {
    const Range range = bytes_of(tensor);
    if (range.high > range.low) {
        const auto [block, base] = memory_of(tensor.storage().data_ptr());
        launch.use(*block, base + range.low, base + range.high, writes);
    }
}

// What the fallback has to know of an op.
struct OpInfo {
    std::string_view name;
    std::vector<bool> written;
    bool is_view = false, syncs = false, is_random = false, takes_masks = false, takes_host_tensors = false;
    int generator = -1, output_size = -1;
};

const OpInfo& info_of(const c10::OperatorHandle& op) {
    thread_local std::unordered_map<const c10::FunctionSchema*, OpInfo> known;
    const c10::FunctionSchema& schema = op.schema();
    auto found = known.find(&schema);
    if (found != known.end()) {
        return found->second;
    }
    OpInfo info;
    info.name = interned(schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name()));
    for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto& argument = schema.arguments()[i];
        info.written.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
        if (argument.type()->str().find("Generator") != std::string::npos) {
            info.generator = int(i);
        }
        if (argument.name() == "output_size" && schema.name() == "aten::repeat_interleave") {
            info.output_size = int(i);
        }
    }
    for (const auto& result : schema.returns()) {
        info.is_view |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    }
    const std::string& name = schema.name();
    info.takes_masks = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" ||
                       name == "aten::_unsafe_index" || name == "aten::index_put";
    info.takes_host_tensors = info.takes_masks;
    info.syncs = !info.takes_masks &&
                 (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape));
    info.is_random = op.hasTag(at::Tag::nondeterministic_seeded);
    return known.emplace(&schema, std::move(info)).first->second;
}

std::uint64_t mixed(std::uint64_t seed, std::uint64_t offset) {  // one round of Philox's key schedule is enough of a hash
    std::uint64_t value = seed * 0xD2511F53CD9E8D57ull ^ (offset + 1) * 0x9E3779B97F4A7C15ull;
    value ^= value >> 31;
    return value * 0xBB67AE8584CAA73Bull;
}

std::uint64_t drawn_seed(at::Generator generator, std::int64_t numel) {
    TORCH_CHECK(
        generator.device().type() == kSim, "Expected a '", c10::DeviceTypeName(kSim, true),
        "' device type for generator but found '", generator.device().type(), "'");
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const auto offset = generator.get_offset();
    generator.set_offset(offset + 4 * std::uint64_t(numel / 4 + 1));
    return mixed(generator.current_seed(), offset);
}

struct Alias {
    at::Tensor device, host;
    bool is_written;
};

class Call {
  public:
    Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), stack_(stack), info_(info_of(op)) {}

    void run() {
        const at::AutoDispatchBelowADInplaceOrView below;
        const auto num_arguments = op_.schema().arguments().size();
        const auto first = stack_->size() - num_arguments;
        bool syncs = info_.syncs;
        for (std::size_t i = 0; i < num_arguments; ++i) {
            take((*stack_)[first + i], i);
        }
        if (info_.output_size >= 0) {
            syncs &= (*stack_)[first + info_.output_size].isNone();
        }
        syncs |= has_mask_;
        if (aliases_.empty() && !is_factory_) {
            TORCH_CHECK(false, info_.name, " was given no tensor of the simulated device");
        }
        if (!op_.hasKernelForDispatchKey(DispatchKey::CPU) &&
            !op_.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd)) {
            TORCH_CHECK_NOT_IMPLEMENTED(
                false, "the simulated device has no kernel of ", info_.name, ", for the CPU has none");
        }
        if (info_.is_view) {
            op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack_);
            return give_all(nullptr);
        }
        Launch launch(info_.name);
        for (const Alias& alias : aliases_) {
            use(launch, alias.device, alias.is_written);
        }
        at::Generator kept;
        c10::intrusive_ptr<c10::TensorImpl> state;
        if (info_.generator >= 0) {
            IValue& given = (*stack_)[first + info_.generator];
            if (is_factory_ || !aliases_.empty()) {
                const at::Generator own = given.isNone() ? at::detail::getPrivateUse1Hooks().getDefaultGenerator(0)
                                                         : given.toGenerator();
                given = at::detail::createCPUGenerator(drawn_seed(own, numel_));
            }
        } else if (info_.is_random) {
            kept = at::detail::getDefaultCPUGenerator();
            const auto seed = drawn_seed(at::detail::getPrivateUse1Hooks().getDefaultGenerator(0), numel_);
            state = kept.unsafeGetGeneratorImpl()->get_state();
            kept.set_current_seed(seed);
        }
        {
            const KernelScope scope(launch);
            op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack_);
        }
        if (state) {
            kept.unsafeGetGeneratorImpl()->set_state(*state);
        }
        for (const Alias& alias : aliases_) {
            if (alias.is_written) {
                take_over(alias);
            }
        }
        give_all(&launch);
        if (syncs) {
            host_waits(clock_of(launch.stream()), info_.name);
        }
    }

  private:
    at::Tensor take_tensor(const at::Tensor& tensor, std::size_t position) {
        if (!tensor.defined()) {
            return tensor;
        }
        if (tensor.device().type() == kSim) {
            at::Tensor host = on_host(tensor);
            numel_ = std::max(numel_, tensor.numel());
            aliases_.push_back({tensor, host, info_.written[position]});
            return host;
        }
        TORCH_CHECK(
            tensor.dim() == 0 || info_.takes_host_tensors || tensor.device().type() != c10::kCPU,
            "Expected all tensors to be on the same device, but ", info_.name, " was given one of ", tensor.sizes(),
            " on the CPU beside those of the simulated device");
        return tensor;
    }

    void take(IValue& value, std::size_t position) {
        if (value.isTensor()) {
            value = take_tensor(value.toTensor(), position);
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> hosts;
            for (const at::Tensor& tensor : value.toTensorList()) {
                hosts.push_back(take_tensor(tensor, position));
            }
            value = std::move(hosts);
        } else if (value.isList() && value.toListRef().size() > 0 && holds_optional_tensors(position)) {
            c10::List<std::optional<at::Tensor>> hosts;
            for (const IValue& one : value.toListRef()) {
                if (one.isNone()) {
                    hosts.push_back(std::nullopt);
                    continue;
                }
                const at::Tensor tensor = one.toTensor();
                has_mask_ |= info_.takes_masks && tensor.defined() &&
                             (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
                hosts.push_back(take_tensor(tensor, position));
            }
            value = std::move(hosts);
        } else if (value.isDevice() && value.toDevice().type() == kSim) {
            value = c10::Device(c10::kCPU);
            is_factory_ = true;
        }
    }

    bool holds_optional_tensors(std::size_t position) const {
        return op_.schema().arguments()[position].type()->str().find("Tensor") != std::string::npos;
    }

    // A kernel may have given an output other sizes, and other memory.
    static void take_over(const Alias& alias) {
        const c10::Storage& host = alias.host.storage();
        c10::TensorImpl* impl = alias.device.unsafeGetTensorImpl();
        const c10::Storage& device = impl->storage();
        if (Block* block = block_of(host.data_ptr())) {  // without one: the memory that it was given
            c10::DataPtr taken = host.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
            taken.release_context();
            const auto size = host.nbytes();
            device.set_data_ptr_noswap(owned(block, false));
            device.set_nbytes(size);
        }
        if (impl->sizes() != alias.host.sizes() || impl->strides() != alias.host.strides()) {
            impl->set_sizes_and_strides(alias.host.sizes(), alias.host.strides());
        }
    }

    at::Tensor give_tensor(const at::Tensor& host, Launch* launch) {
        if (!host.defined() || host.device().type() != c10::kCPU) {
            return host;
        }
        for (const Alias& alias : aliases_) {
            if (alias.host.is_same(host)) {
                return alias.device;
            }
        }
        c10::StorageImpl* impl = host.storage().unsafeGetStorageImpl();
        c10::Storage storage;
        for (const Alias& alias : aliases_) {
            if (alias.host.storage().unsafeGetStorageImpl() == impl) {
                storage = alias.device.storage();
            }
        }
        for (const auto& [from, made] : made_) {
            if (from == impl) {
                storage = made;
            }
        }
        if (!storage.unsafeGetStorageImpl()) {
            const auto size = host.storage().nbytes();
            Block* block = block_of(host.storage().data_ptr());
            c10::DataPtr pointer;
            if (block != nullptr) {
                impl->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::kCPU))).release_context();
                pointer = owned(block, false);
            } else {
                pointer = device_allocator()->allocate(size);
                block = block_of(pointer);
                if (block != nullptr) {
                    std::memcpy(block->memory, host.storage().data(), size);
                }
            }
            if (block != nullptr && launch != nullptr) {
                launch->use(*block, 0, size, true);
            }
            storage = c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(pointer), device_allocator(), true);
            made_.emplace_back(impl, storage);
        }
        at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
            std::move(storage), DispatchKeySet(DispatchKey::PrivateUse1), host.dtype());
        c10::TensorImpl* tensor = made.unsafeGetTensorImpl();
        tensor->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
        if (host.unsafeGetTensorImpl()->is_wrapped_number()) {
            tensor->set_wrapped_number(true);
        }
        if (host.is_conj()) {
            tensor->_set_conj(true);
        }
        if (host.is_neg()) {
            tensor->_set_neg(true);
        }
        return made;
    }

    void give_all(Launch* launch) {
        const auto num_results = op_.schema().returns().size();
        const auto first = stack_->size() - num_results;
        for (std::size_t i = 0; i < num_results; ++i) {
            IValue& value = (*stack_)[first + i];
            if (value.isTensor()) {
                value = give_tensor(value.toTensor(), launch);
            } else if (value.isTensorList()) {
                c10::List<at::Tensor> given;
                for (const at::Tensor& tensor : value.toTensorList()) {
                    given.push_back(give_tensor(tensor, launch));
                }
                value = std::move(given);
            }
        }
    }

    const c10::OperatorHandle& op_;
    Stack* stack_;
    const OpInfo& info_;
    std::vector<Alias> aliases_;
    std::vector<std::pair<c10::StorageImpl*, c10::Storage>> made_;
    std::int64_t numel_ = 0;
    bool is_factory_ = false, has_mask_ = false;
};

void fallback(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) { Call(op, stack).run(); }

// ------------------------------------------------------------------------------------------ ops of the device's own

at::ScalarType type_or_default(std::optional<at::ScalarType> dtype) { return c10::dtype_or_default(dtype); }

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device>,
    std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
    TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
    TORCH_CHECK_NOT_IMPLEMENTED(
        layout.value_or(c10::kStrided) == c10::kStrided, "the simulated device has strided tensors alone");
    return at::Tensor(at::detail::empty_generic(
        sizes, device_allocator(), DispatchKeySet(DispatchKey::PrivateUse1), type_or_default(dtype), format));
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool> pin_memory) {
    TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
    return at::Tensor(at::detail::empty_strided_generic(
        sizes, strides, device_allocator(), DispatchKeySet(DispatchKey::PrivateUse1), type_or_default(dtype)));
}

// The zeros of forward-mode differentiation, which have no memory.
at::Tensor zeros_without_memory(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>) {
    at::native::ZeroTensorAllocator allocator(the_device());
    const DispatchKeySet keys({DispatchKey::PrivateUse1, DispatchKey::ZeroTensor});
    return at::Tensor(at::detail::empty_generic(sizes, &allocator, keys, type_or_default(dtype), std::nullopt));
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<std::int64_t> offset) {
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
    for (const auto size : sizes) {
        TORCH_CHECK(size >= 0, "as_strided: sizes must not be negative, got ", sizes);
    }
    view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset.value_or(self.storage_offset()));
    const Range range = bytes_of(view);
    TORCH_CHECK(
        range.high <= self.storage().nbytes(), "setStorage: sizes ", sizes, ", strides ", strides, ", storage offset ",
        view.storage_offset(), ", and itemsize ", view.itemsize(), " requiring a storage size of ", range.high,
        " are out of bounds for storage of size ", self.storage().nbytes());
    return view;
}

void grow(const c10::Storage& storage, std::size_t size) {
    if (storage.nbytes() < size) {
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, size);
    }
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
    c10::TensorImpl* impl = self.unsafeGetTensorImpl();
    if (impl->sizes() != sizes) {
        impl->set_sizes_contiguous(sizes);
    }
    if (format.has_value()) {
        impl->empty_tensor_restride(*format);
    }
    grow(self.storage(), bytes_of(self).high);
    return self;
}

at::Tensor& set_storage(
    at::Tensor& self, c10::Storage storage, std::int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
    TORCH_CHECK(
        storage.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
        "\" to a storage on different device \"", storage.device(), "\"");
    c10::TensorImpl* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_storage_offset(offset);
    if (strides.data() == nullptr) {
        impl->set_sizes_contiguous(sizes);
    } else {
        impl->set_sizes_and_strides(sizes, strides);
    }
    grow(self.storage(), bytes_of(self).high);
    return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) {
    const auto numel = static_cast<std::int64_t>(storage.nbytes() / self.itemsize());
    return set_storage(self, std::move(storage), 0, {numel}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
    return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
    return set_storage(self, storage, 0, {0}, {});
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const bool from_device = from.device().type() == kSim, to_device = to.device().type() == kSim;
    if (to.numel() == 0) {
        return to;
    }
    if (from_device && to_device) {
        Launch launch("aten::copy_");
        use(launch, from, false);
        use(launch, to, true);
        const at::Tensor host = on_host(to);
        const KernelScope scope(launch);
        host.copy_(on_host(from));
        return to;
    }
    const at::Tensor& outside = to_device ? from : to;
    TORCH_CHECK(outside.device().type() == c10::kCPU, "the simulated device copies from and to the CPU alone");
    Launch launch(to_device ? "copy from the host to the device" : "copy from the device to the host");
    use(launch, to_device ? to : from, to_device);
    const Range range = bytes_of(outside);
    Block* pinned = pinned_block_of(outside.storage().data());
    {
        const Unprotected own(pinned);
        if (pinned != nullptr) {
            const std::size_t base = static_cast<const char*>(outside.storage().data()) - pinned->memory;
            launch.use(*pinned, base + range.low, base + range.high, !to_device);
        }
        if (to_device) {
            on_host(to).copy_(from);
        } else {
            to.copy_(on_host(from));
        }
        // Results of a copy to pageable memory are there when the call returns, as CUDA has it; such a copy to the device
        // has taken its source then.
        if (!non_blocking || (pinned == nullptr && !to_device)) {
            host_waits(clock_of(launch.stream()), to_device ? "blocking copy to the device" : "copy to the host");
        }
    }
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

// Results that go to the CPU without waiting go to pinned memory, as those of CUDA do.
at::Tensor to_copy(
    const at::Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking, std::optional<at::MemoryFormat> format) {
    const at::Device target = device.value_or(self.device());
    const bool pins = pin_memory.value_or(false) || (non_blocking && target.type() == c10::kCPU);
    const auto options =
        at::TensorOptions().dtype(dtype.value_or(self.scalar_type())).device(target).pinned_memory(pins).layout(layout);
    const auto wanted = format.value_or(at::MemoryFormat::Preserve);
    at::Tensor made = wanted == at::MemoryFormat::Preserve && self.is_non_overlapping_and_dense()
                          ? at::empty_strided(self.sizes(), self.strides(), options)
                          : at::empty(self.sizes(), options,
                                      wanted == at::MemoryFormat::Preserve ? self.suggest_memory_format() : wanted);
    made.copy_(self, non_blocking);
    return made;
}

void record_tensor_stream(at::Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr(), stream.id()); }

// The cells of recurrent networks, which devices have as one kernel: gates are (input, forget, cell, output).
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
    at::Tensor gates = input_gates + hidden_gates;
    for (const auto& bias : {input_bias, hidden_bias}) {
        if (bias.has_value() && bias->defined()) {
            gates = gates + *bias;
        }
    }
    const auto parts = gates.chunk(4, 1);
    const at::Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
    const at::Tensor cy = forget * cx + in * cell;
    return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const std::optional<at::Tensor>& grad_hy, const std::optional<at::Tensor>& grad_cy, const at::Tensor& cx,
    const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
    const auto parts = workspace.chunk(4, 1);
    const at::Tensor &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
    const at::Tensor squashed = cy.tanh();
    const auto given = [&](const std::optional<at::Tensor>& one) {
        return one.has_value() && one->defined() ? *one : at::zeros_like(cy);
    };
    const at::Tensor hidden = given(grad_hy), through = given(grad_cy) + hidden * out * (1 - squashed * squashed);
    const at::Tensor gates = at::cat(
        {through * cell * in * (1 - in), through * cx * forget * (1 - forget), through * in * (1 - cell * cell),
         hidden * squashed * out * (1 - out)},
        1);
    return {gates, through * forget, has_bias ? gates.sum(0) : at::Tensor()};
}

// Gates are (reset, update, new).
std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hx,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
    const auto parts_of = [](const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
        return (bias.has_value() && bias->defined() ? gates + *bias : gates).chunk(3, 1);
    };
    const auto in = parts_of(input_gates, input_bias), hidden = parts_of(hidden_gates, hidden_bias);
    const at::Tensor reset = (in[0] + hidden[0]).sigmoid(), update = (in[1] + hidden[1]).sigmoid();
    const at::Tensor fresh = (in[2] + reset * hidden[2]).tanh();
    return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& gradient, const at::Tensor& workspace, bool has_bias) {
    const auto parts = workspace.chunk(5, 1);
    const at::Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3], &hidden = parts[4];
    const at::Tensor of_fresh = gradient * (1 - update) * (1 - fresh * fresh);
    const at::Tensor of_update = gradient * (hx - fresh) * update * (1 - update);
    const at::Tensor of_reset = of_fresh * hidden * reset * (1 - reset);
    const at::Tensor input_gates = at::cat({of_reset, of_update, of_fresh}, 1);
    const at::Tensor hidden_gates = at::cat({of_reset, of_update, of_fresh * reset}, 1);
    const auto bias = [&](const at::Tensor& gates) { return has_bias ? gates.sum(0) : at::Tensor(); };
    return {input_gates, hidden_gates, gradient * update, bias(input_gates), bias(hidden_gates)};
}

// Convolutions, which have a kernel of their own for each library: that of the CPU.
at::Tensor to_device(const at::Tensor& host) {
    if (!host.defined()) {
        return host;
    }
    at::Tensor made = at::empty(host.sizes(), host.options().device(the_device()));
    on_host(made).copy_(host);
    return made;
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, std::int64_t groups) {
    Launch launch("aten::convolution");
    std::optional<at::Tensor> added;
    for (const at::Tensor& one : {input, weight}) {
        use(launch, one, false);
    }
    if (bias.has_value() && bias->defined()) {
        use(launch, *bias, false);
        added = on_host(*bias);
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::DisableRecordFunctionGuard unseen;
    return to_device(at::convolution(
        on_host(input), on_host(weight), added, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, std::int64_t groups,
    std::array<bool, 3> mask) {
    Launch launch("aten::convolution_backward");
    for (const at::Tensor& one : {gradient, input, weight}) {
        use(launch, one, false);
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::DisableRecordFunctionGuard unseen;
    const std::int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
    const auto [of_input, of_weight, of_bias] = at::convolution_backward(
        on_host(gradient), on_host(input), on_host(weight), at::IntArrayRef{channels}, stride, padding, dilation, transposed,
        output_padding, groups, mask);
    return {to_device(of_input), to_device(of_weight), to_device(of_bias)};
}

}  // namespace

at::Tensor kernel_view_of(const at::Tensor& tensor) { return on_host(tensor); }
void use_tensor(Launch& launch, const at::Tensor& tensor, bool writes) { use(launch, tensor, writes); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", TORCH_FN(empty));
    m.impl("empty_strided", TORCH_FN(empty_strided));
    m.impl("_efficientzerotensor", TORCH_FN(zeros_without_memory));
    m.impl("as_strided", TORCH_FN(as_strided));
    m.impl("view", TORCH_FN(at::native::view));
    m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
    m.impl("resize_", TORCH_FN(resize_));
    m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
    m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
    m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
    m.impl("set_", TORCH_FN(set_empty));
    m.impl("convolution_overrideable", TORCH_FN(convolution));
    m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
    m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
    m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
    m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
    m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
    m.impl("_copy_from", TORCH_FN(copy_from));
    m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
    m.impl("_to_copy", TORCH_FN(to_copy));
    m.impl("record_stream", TORCH_FN(record_tensor_stream));
}

// Autocast: the ops that CUDA runs in lower precision, in float32, or in the widest type of their operands.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    using at::IntArrayRef, at::Scalar, at::ScalarType, at::Tensor;  // that PyTorch's lists name
#define SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FLOAT32_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
    AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
    AT_FORALL_FP32(SIM_FLOAT32)
    AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FLOAT32_RESULT)
    AT_FORALL_PROMOTE(SIM_WIDEST)
    AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
}

// Sparse tensors, as gradients of embeddings, are made, taken apart and read by code that has no device.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
    m.impl("empty.memory_format", TORCH_FN(at::native::empty_sparse_symint));
    m.impl("clone", TORCH_FN(at::native::clone_sparse));
    m.impl("copy_", TORCH_FN(at::native::copy_sparse_wrapper_));
    m.impl("copy_sparse_to_sparse_", TORCH_FN(at::native::copy_sparse_));
    m.impl("_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(at::native::new_with_dims_and_tensor_sparse_symint));
    m.impl("_indices", TORCH_FN(at::native::_indices_sparse));
    m.impl("_values", TORCH_FN(at::native::_values_sparse));
    m.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
    m.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
    m.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
    m.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
    m.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
}

// Ops with a kernel of the CPU take it directly; otherwise structured ones would be taken apart first.
void register_ops() {
    static auto* handles = new std::vector<c10::RegistrationHandleRAII>;
    auto& dispatcher = c10::Dispatcher::singleton();
    handles->push_back(dispatcher.registerFallback(
        DispatchKey::PrivateUse1, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), "simulated device"));
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
        const auto op = dispatcher.findOp(name);
        const bool is_own = !name.name.starts_with("aten::") || name.name == "aten::is_pinned";
        if (is_own || !op.has_value() || !op->hasKernelForDispatchKey(DispatchKey::CPU) ||
            op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) {
            continue;
        }
        handles->push_back(dispatcher.registerImpl(
            name, DispatchKey::PrivateUse1, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), std::nullopt, nullptr,
            "simulated device"));
    }
}

}  // namespace sim

// A copy of a conjugated or negated tensor reads its bits as they are: to resolve them is to copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
