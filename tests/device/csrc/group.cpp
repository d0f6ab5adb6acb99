// A process group that behaves as NCCL's does, over one of gloo's.
//
// A collective runs on a stream of its communicator (or on the current one, if the caller waits at once), and waits there for
// the current stream. Its inputs are taken when it is launched; a thread of the communicator exchanges them in order; the
// results are written when something that is ordered after the collective touches them, or the host waits for it. Until then
// the outputs are poison.

#include "sim.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/exception.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <deque>
#include <functional>
#include <thread>

namespace sim {

at::Tensor kernel_view_of(const at::Tensor& tensor);
void use_tensor(Launch& launch, const at::Tensor& tensor, bool writes);

namespace {

using c10d::Backend;
using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using Milliseconds = std::chrono::milliseconds;
using GlooWork = c10::intrusive_ptr<c10d::Work>;

constexpr std::size_t kSignature = 640;
constexpr int kPairTag = 1, kBatchTag = 2, kHeader = 2;

class Collective;

struct Communicator {
    std::string name;
    StreamNo stream;
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> jobs;
    std::string error;  // of its thread alone: after a failure nothing runs any more
};

void work_on(const std::shared_ptr<Communicator>& communicator) {
    for (;;) {
        std::function<void()> job;
        {
            std::unique_lock<std::mutex> lock(communicator->lock);
            communicator->changed.wait(lock, [&] { return !communicator->jobs.empty(); });
            job = std::move(communicator->jobs.front());
            communicator->jobs.pop_front();
        }
        if (!job) {
            return;
        }
        const c10::InferenceMode inference;  // what it writes may have been made in one
        job();
    }
}

// One op of a communicator, as its thread runs it: with copies of its inputs, and room for its outputs.
struct Op {
    OpType type;
    std::string name, signature;
    Tensors inputs, outputs;  // of the device
    Tensors staged_inputs, staged_outputs;
    std::function<void(Op&)> body;                         // blocks
    std::function<std::vector<GlooWork>(Op&)> start_pair;  // of sends and receives, which a batch starts together
    std::function<void(Op&)> check_pair;
};

class Collective final : public Pending {
  public:
    std::vector<Op> ops;
    Tensors kept;  // inputs and outputs of a work that was dropped

    // Runs on the communicator's thread.
    void run(Communicator& communicator, const std::function<void()>& body) {
        std::string& error = communicator.error;
        try {
            if (error.empty()) {
                body();
            }
        } catch (const c10::Error& caught) {
            error = caught.what_without_backtrace();
        } catch (const std::exception& caught) {
            error = caught.what();
        }
        {
            const std::lock_guard<std::mutex> lock(lock_);
            is_done_ = true;
            error_ = error;
        }
        if (!error.empty()) {
            fail_device("a collective has failed: " + error);
        }
        done_.notify_all();
    }

    void add_target(Block* block, std::size_t low, at::Tensor staged) {
        targets_.push_back({block, low, std::move(staged)});
    }

    void finish() override {
        {
            const NoGil without;
            std::unique_lock<std::mutex> lock(lock_);
            done_.wait(lock, [&] { return is_done_; });
            if (!is_finished_ && error_.empty()) {
                for (const Target& target : targets_) {
                    if (target.block != nullptr) {
                        std::memcpy(target.block->memory + target.low, target.staged.data_ptr(), target.staged.nbytes());
                    }
                }
            }
            is_finished_ = true;
            const auto tables = lock_tables();
            for (const Target& target : targets_) {
                if (target.block != nullptr) {
                    std::erase_if(target.block->in_flight, [&](const auto& one) { return one.pending.get() == this; });
                }
            }
        }
        remove_pending(this);
        Tensors dropped;
        {
            const std::lock_guard<std::mutex> lock(lock_);
            dropped.swap(kept);
            targets_.clear();
        }
        if (!error_.empty()) {
            C10_THROW_ERROR(DistBackendError, error_);
        }
    }

    bool has_ended() override {
        const std::lock_guard<std::mutex> lock(lock_);
        return is_done_;
    }

    void forget(Block& block) override {
        const std::lock_guard<std::mutex> lock(lock_);
        for (Target& target : targets_) {
            if (target.block == &block) {
                target.block = nullptr;
            }
        }
    }

    void keep(Tensors tensors) {
        const std::lock_guard<std::mutex> lock(lock_);
        if (!is_finished_) {
            kept = std::move(tensors);
        }
    }

    bool is_done() {
        const std::lock_guard<std::mutex> lock(lock_);
        return is_done_;
    }

  private:
    struct Target {
        Block* block;
        std::size_t low;
        at::Tensor staged;
    };
    std::vector<Target> targets_;
    std::mutex lock_;
    std::condition_variable done_;
    bool is_done_ = false, is_finished_ = false;
    std::string error_;
};

class SimWork final : public c10d::Work {
  public:
    SimWork(int rank, OpType type, std::shared_ptr<Collective> collective, Clock end, Tensors inputs, Tensors outputs, bool blocks)
        : Work(rank, type), collective_(std::move(collective)), end_(std::move(end)), outputs_(std::move(outputs)),
          blocks_(blocks) {
        stash_ = std::move(inputs);
        stash_.insert(stash_.end(), outputs_.begin(), outputs_.end());
    }
    ~SimWork() override {
        if (!stash_.empty()) {
            collective_->keep(std::move(stash_));
        }
    }
    bool isCompleted() override {
        if (host_knows(end_)) {
            return true;
        }
        if (queries_++ == 0 || !collective_->is_done()) {
            return false;
        }
        host_learns(end_);
        return true;
    }
    bool isSuccess() const override { return true; }
    void synchronize() override {
        raise_noticed();
        stream_waits(current_stream(), end_);
        stash_.clear();
    }
    bool wait(Milliseconds timeout) override {
        if (blocks_ || timeout != kNoTimeout) {
            host_waits(end_, "wait() for a collective, which blocks the host");
        }
        synchronize();
        return true;
    }
    void blockCurrentStream() override { synchronize(); }
    Tensors result() override { return outputs_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        if (!future_) {
            const c10::StreamGuard on_stream(c10::Stream(c10::Stream::UNSAFE, the_device(), collective_->stream));
            future_ = c10::make_intrusive<c10::ivalue::Future>(
                c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{the_device()});
            future_->markCompleted(c10::IValue(outputs_));
        }
        return future_;
    }
    std::uint64_t getSequencenumber() const override { return sequence; }
    std::uint64_t sequence = 0;

  private:
    std::shared_ptr<Collective> collective_;
    Clock end_;
    Tensors outputs_, stash_;
    bool blocks_;
    int queries_ = 0;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

std::string words(const at::Tensor& tensor) { return c10::str(tensor.scalar_type(), tensor.sizes()); }
std::string words(const Tensors& tensors) {
    std::string found;
    for (const at::Tensor& tensor : tensors) {
        found += (found.empty() ? "" : " ") + words(tensor);
    }
    return found;
}

at::Tensor raw(const at::Tensor& tensor) { return tensor.reshape({-1}).view(at::kByte); }
Tensors raw(const Tensors& tensors) {
    Tensors found;
    for (const at::Tensor& tensor : tensors) {
        found.push_back(raw(tensor));
    }
    return found;
}

const char* const kReduceNames[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};

class Group final : public Backend {
  public:
    Group(int rank, int size, c10::intrusive_ptr<Backend> gloo, std::string name, Milliseconds timeout)
        : Backend(rank, size), gloo_(std::move(gloo)), name_(std::move(name)), timeout_(timeout),
          options_(c10::make_intrusive<Options>("simccl", timeout)) {}
    ~Group() override { stop(); }

    const std::string getBackendName() const override { return "simccl"; }
    bool supportsSplitting() const override { return true; }
    bool supportsCoalescing() const override { return true; }
    c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
    void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
    void setSequenceNumberForGroup() override {}
    std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
    c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }

    c10::intrusive_ptr<Backend> split(
        const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
        const c10::intrusive_ptr<Options>& options) override {
        const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
        auto gloo_options = gloo_->getBackendOptions();
        gloo_options->group_name = options->group_name;
        auto gloo = gloo_->split(store, ranks, gloo_options);
        if (mine == ranks.end() || !gloo) {
            return nullptr;
        }
        return c10::make_intrusive<Group>(
            int(mine - ranks.begin()), int(ranks.size()), gloo, options->group_name, options->timeout);
    }

    void abort() override {
        is_aborted_ = true;
        gloo_->abort();
        stop();
    }
    void shutdown() override {
        stop();
        gloo_->shutdown();
    }

    void startCoalescing() override {
        TORCH_CHECK(!is_coalescing_, "coalescing has been started already");
        is_coalescing_ = true;
    }
    GlooWork endCoalescing() override {
        TORCH_CHECK(is_coalescing_, "coalescing was not started");
        is_coalescing_ = false;
        std::vector<Op> ops;
        ops.swap(coalesced_);
        if (ops.empty()) {
            return nullptr;
        }
        return launch(communicator("all"), std::move(ops), true, OpType::COALESCED);
    }

    GlooWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        const at::Tensor tensor = single(tensors, "allreduce");
        return collective(reduction(OpType::ALLREDUCE, "allreduce", {tensor}, options.reduceOp), options.asyncOp);
    }
    GlooWork allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
        return collective(
            reduction(OpType::ALLREDUCE_COALESCED, "allreduce_coalesced", tensors, options.reduceOp),
            options.asyncOp);
    }
    GlooWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
        const at::Tensor tensor = single(tensors, "broadcast");
        Op op{OpType::BROADCAST, "broadcast", c10::str("from ", options.rootRank, " ", words(tensor)), {}, {tensor}};
        if (options.rootRank == rank_) {
            op.inputs = {tensor};
        }
        op.body = [gloo = gloo_, options](Op& op) {
            Tensors given{raw(op.staged_outputs[0])};
            if (!op.staged_inputs.empty()) {
                given[0].copy_(raw(op.staged_inputs[0]));
            }
            gloo->broadcast(given, options)->wait();
        };
        return collective(std::move(op), options.asyncOp);
    }
    GlooWork reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
        const at::Tensor tensor = single(tensors, "reduce");
        Op op = reduction(OpType::REDUCE, "reduce", {tensor}, options.reduceOp);
        op.signature = c10::str("to ", options.rootRank, " ", op.signature);
        if (options.rootRank != rank_) {  // what is there stays
            op.outputs.clear();
            op.body = [body = op.body](Op& op) {
                op.staged_outputs = {op.staged_inputs[0].clone()};
                body(op);
                op.staged_outputs.clear();
            };
        }
        return collective(std::move(op), options.asyncOp);
    }
    GlooWork allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
        const at::Tensor input = single(inputs, "allgather");
        Op op{OpType::ALLGATHER, "allgather", words(outputs.at(0)), {input}, outputs.at(0)};
        TORCH_CHECK(int(op.outputs.size()) == size_, "allgather: ", op.outputs.size(), " outputs for ", size_, " ranks");
        op.body = [gloo = gloo_, rank = rank_](Op& op) {
            for (std::size_t root = 0; root < op.staged_outputs.size(); ++root) {  // they may be uneven
                Tensors given{raw(op.staged_outputs[root])};
                if (int(root) == rank) {
                    given[0].copy_(raw(op.staged_inputs[0]));
                }
                c10d::BroadcastOptions from;
                from.rootRank = std::int64_t(root);
                gloo->broadcast(given, from)->wait();
            }
        };
        return collective(std::move(op), options.asyncOp);
    }
    GlooWork _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
        return collective(gathering("_allgather_base", {output}, {input}), options.asyncOp);
    }
    GlooWork allgather_into_tensor_coalesced(
        Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
        return collective(gathering("allgather_into_tensor_coalesced", outputs, inputs), options.asyncOp);
    }
    GlooWork reduce_scatter(
        Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
        const at::Tensor output = single(outputs, "reduce_scatter");
        Op op{OpType::REDUCE_SCATTER, "reduce_scatter",
              c10::str(kReduceNames[options.reduceOp.op_], " ", words(inputs.at(0))), inputs.at(0), {output}};
        op.body = [this_ = shared(), options](Op& op) {
            Tensors flat;
            std::int64_t before = 0;
            for (std::size_t i = 0; i < op.staged_inputs.size(); ++i) {
                flat.push_back(op.staged_inputs[i].reshape({-1}));
                before += int(i) < this_->rank_ ? flat[i].numel() : 0;
            }
            at::Tensor all = at::cat(flat);
            this_->reduce_all(all, options.reduceOp);
            op.staged_outputs[0].reshape({-1}).copy_(all.narrow(0, before, op.staged_outputs[0].numel()));
        };
        return collective(std::move(op), options.asyncOp);
    }
    GlooWork _reduce_scatter_base(
        at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
        return collective(scattering("_reduce_scatter_base", {output}, {input}, options.reduceOp), options.asyncOp);
    }
    GlooWork reduce_scatter_tensor_coalesced(
        Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
        return collective(
            scattering("reduce_scatter_tensor_coalesced", outputs, inputs, options.reduceOp), options.asyncOp);
    }
    GlooWork alltoall_base(
        at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes, std::vector<std::int64_t>& input_sizes,
        const c10d::AllToAllOptions& options) override {
        Op op{OpType::ALLTOALL_BASE, "alltoall_base", c10::str(output.scalar_type()), {input}, {output}};
        op.body = [gloo = gloo_, output_sizes, input_sizes](Op& op) mutable {
            gloo->alltoall_base(op.staged_outputs[0], op.staged_inputs[0], output_sizes, input_sizes)->wait();
        };
        return collective(std::move(op), options.asyncOp);
    }
    GlooWork alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
        TORCH_CHECK(!outputs.empty() && outputs.size() == inputs.size(), "alltoall: a tensor for each rank");
        Op op{OpType::ALLTOALL, "alltoall", c10::str(outputs[0].scalar_type()), inputs, outputs};
        op.body = [gloo = gloo_](Op& op) {
            const auto sizes = [](const Tensors& tensors) {
                std::vector<std::int64_t> found;
                for (const at::Tensor& tensor : tensors) {
                    found.push_back(std::int64_t(tensor.nbytes()));
                }
                return found;
            };
            auto sent = sizes(op.staged_inputs), received = sizes(op.staged_outputs);
            at::Tensor from = at::cat(raw(op.staged_inputs)), to = at::cat(raw(op.staged_outputs));
            gloo->alltoall_base(to, from, received, sent)->wait();
            std::int64_t at = 0;
            for (std::size_t i = 0; i < op.staged_outputs.size(); ++i) {
                raw(op.staged_outputs[i]).copy_(to.narrow(0, at, received[i]));
                at += received[i];
            }
        };
        return collective(std::move(op), options.asyncOp);
    }
    GlooWork gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
        const at::Tensor input = single(inputs, "gather");
        Op op{OpType::GATHER, "gather", c10::str("to ", options.rootRank, " ", input.scalar_type()), {input},
              outputs.empty() ? Tensors() : outputs[0]};
        op.body = [gloo = gloo_, options](Op& op) {
            std::vector<Tensors> out;
            if (!op.staged_outputs.empty()) {
                out.push_back(raw(op.staged_outputs));
            }
            Tensors in{raw(op.staged_inputs[0])};
            gloo->gather(out, in, options)->wait();
        };
        return collective(std::move(op), options.asyncOp);
    }
    GlooWork scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
        const at::Tensor output = single(outputs, "scatter");
        Op op{OpType::SCATTER, "scatter", c10::str("from ", options.rootRank, " ", words(output)),
              inputs.empty() ? Tensors() : inputs[0], {output}};
        op.body = [gloo = gloo_, options](Op& op) {
            std::vector<Tensors> in;
            if (!op.staged_inputs.empty()) {
                in.push_back(raw(op.staged_inputs));
            }
            Tensors out{raw(op.staged_outputs[0])};
            gloo->scatter(out, in, options)->wait();
        };
        return collective(std::move(op), options.asyncOp);
    }
    GlooWork barrier(const c10d::BarrierOptions&) override {
        Op op{OpType::BARRIER, "barrier", "", {}, {}};
        op.body = [this_ = shared()](Op&) {
            at::Tensor one = at::empty({1}, at::kInt).fill_(1);
            this_->reduce_all(one, ReduceOp::SUM);
        };
        return collective(std::move(op), true);
    }
    GlooWork send(Tensors& tensors, int to, int) override { return pair(single(tensors, "send"), to, true); }
    GlooWork recv(Tensors& tensors, int from, int) override { return pair(single(tensors, "recv"), from, false); }

  private:
    c10::intrusive_ptr<Group> shared() { return c10::intrusive_ptr<Group>::reclaim_copy(this); }

    static at::Tensor single(const Tensors& tensors, const char* name) {
        TORCH_CHECK(tensors.size() == 1, name, " takes one tensor, not ", tensors.size());
        return tensors[0];
    }

    // Runs on a communicator's thread.
    void reduce_all(at::Tensor& tensor, const ReduceOp& reduce_op) {
        c10d::AllreduceOptions options;
        const auto kind = reduce_op.op_;
        const bool sums = kind == ReduceOp::AVG || kind == ReduceOp::PREMUL_SUM;
        if (kind == ReduceOp::PREMUL_SUM) {
            const auto* factor = dynamic_cast<const c10d::PreMulSumSupplement*>(reduce_op.supplement_.get());
            TORCH_CHECK(factor != nullptr, "premul_sum without a factor");
            if (factor->tensor_factor.defined()) {
                tensor.mul_(factor->tensor_factor);
            } else {
                tensor.mul_(factor->double_factor);
            }
        }
        options.reduceOp = sums ? ReduceOp(ReduceOp::SUM) : reduce_op;
        Tensors given{tensor.is_complex() ? at::view_as_real(tensor) : tensor};
        gloo_->allreduce(given, options)->wait();
        if (kind == ReduceOp::AVG) {
            tensor.div_(size_);
        }
    }

    Op reduction(OpType type, const char* name, const Tensors& tensors, const ReduceOp& reduce_op) {
        Op op{type, name, c10::str(kReduceNames[reduce_op.op_], " ", words(tensors)), tensors, tensors};
        op.body = [this_ = shared(), reduce_op](Op& op) {
            for (std::size_t i = 0; i < op.staged_inputs.size(); ++i) {
                this_->reduce_all(op.staged_inputs[i], reduce_op);
                op.staged_outputs[i].copy_(op.staged_inputs[i]);
            }
        };
        return op;
    }
    Op gathering(const char* name, const Tensors& outputs, const Tensors& inputs) {
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            TORCH_CHECK(
                outputs.at(i).numel() == inputs[i].numel() * size_, name, ": output of ", outputs[i].sizes(), " for inputs of ",
                inputs[i].sizes(), " of ", size_, " ranks");
        }
        Op op{OpType::_ALLGATHER_BASE, name, words(inputs), inputs, outputs};
        op.body = [gloo = gloo_](Op& op) {
            for (std::size_t i = 0; i < op.staged_inputs.size(); ++i) {
                at::Tensor out = raw(op.staged_outputs[i]), in = raw(op.staged_inputs[i]);
                gloo->_allgather_base(out, in)->wait();
            }
        };
        return op;
    }
    Op scattering(const char* name, const Tensors& outputs, const Tensors& inputs, const ReduceOp& reduce_op) {
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            TORCH_CHECK(
                inputs[i].numel() == outputs.at(i).numel() * size_, name, ": input of ", inputs[i].sizes(), " for an output of ",
                outputs[i].sizes(), " of ", size_, " ranks");
        }
        Op op{OpType::_REDUCE_SCATTER_BASE, name, c10::str(kReduceNames[reduce_op.op_], " ", words(inputs)), inputs, outputs};
        op.body = [this_ = shared(), reduce_op](Op& op) {
            for (std::size_t i = 0; i < op.staged_inputs.size(); ++i) {
                at::Tensor out = op.staged_outputs[i].reshape({-1}), in = op.staged_inputs[i].reshape({-1});
                this_->reduce_all(in, reduce_op);
                out.copy_(in.narrow(0, this_->rank_ * out.numel(), out.numel()));
            }
        };
        return op;
    }

    GlooWork pair(const at::Tensor& tensor, int peer, bool sends) {
        Op op{sends ? OpType::SEND : OpType::RECV, sends ? "send" : "recv", words(tensor), {}, {}};
        (sends ? op.inputs : op.outputs) = {tensor};
        const int tag = is_coalescing_ ? kBatchTag : kPairTag;
        at::Tensor header = at::empty({std::int64_t(kSignature)}, at::kByte).fill_(0);
        const std::uint64_t size = tensor.nbytes();
        auto* text = static_cast<char*>(header.data_ptr());
        std::memcpy(text, op.signature.data(), std::min(op.signature.size(), kSignature - sizeof(size) - 1));
        std::memcpy(text + kSignature - sizeof(size), &size, sizeof(size));
        op.start_pair = [gloo = gloo_, peer, tag, sends, header](Op& op) {
            Tensors head{header}, data{raw(sends ? op.staged_inputs[0] : op.staged_outputs[0])};
            std::vector<GlooWork> works;
            if (sends) {
                works.push_back(gloo->send(head, peer, tag + kHeader));
                works.push_back(gloo->send(data, peer, tag));
            } else {
                works.push_back(gloo->recv(head, peer, tag + kHeader));
                works.back()->wait();
                works.clear();
                const auto* text = static_cast<const char*>(header.data_ptr());
                const std::string found(text);
                if (found != op.signature) {  // the next message of this pair is the next one
                    std::uint64_t size = 0;
                    std::memcpy(&size, text + kSignature - sizeof(size), sizeof(size));
                    Tensors unread{at::empty({std::int64_t(size)}, at::kByte)};
                    gloo->recv(unread, peer, tag)->wait();
                }
                TORCH_CHECK(
                    found == op.signature, "rank ", peer, " sends ", found, " where this rank receives ", op.signature);
                works.push_back(gloo->recv(data, peer, tag));
            }
            return works;
        };
        if (is_coalescing_) {
            check(op);
            coalesced_.push_back(std::move(op));
            return nullptr;
        }
        std::vector<Op> ops;
        ops.push_back(std::move(op));
        const std::string key = c10::str("pair ", std::min(rank_, peer), ":", std::max(rank_, peer));
        return launch(communicator(key), std::move(ops), true, sends ? OpType::SEND : OpType::RECV);
    }

    GlooWork collective(Op op, bool is_async) {
        check(op);
        if (is_coalescing_) {
            coalesced_.push_back(std::move(op));
            return nullptr;
        }
        const OpType type = op.type;
        std::vector<Op> ops;
        ops.push_back(std::move(op));
        return launch(communicator("all"), std::move(ops), is_async, type);
    }

    static void check(const Op& op) {
        for (const Tensors* tensors : {&op.inputs, &op.outputs}) {
            for (const at::Tensor& tensor : *tensors) {
                TORCH_CHECK(
                    tensor.device().type() == kSim, op.name, ": the backend simccl takes tensors of the simulated device alone, not of ",
                    tensor.device());
                TORCH_CHECK(tensor.is_contiguous(), op.name, ": Tensors must be contiguous");
            }
        }
    }

    std::shared_ptr<Communicator> communicator(const std::string& key) {
        TORCH_CHECK(!is_aborted_, "the process group ", name_, " was aborted");
        const std::lock_guard<std::mutex> lock(lock_);
        auto& found = communicators_[key];
        if (!found) {
            found = std::make_shared<Communicator>();
            found->name = c10::str(name_, " ", key);
            found->stream = new_stream(-1, true);
            count_communicator(found->name);
            std::thread(work_on, found).detach();
        }
        return found;
    }

    void stop() {
        const std::lock_guard<std::mutex> lock(lock_);
        for (const auto& [key, communicator] : communicators_) {
            const std::lock_guard<std::mutex> own(communicator->lock);
            communicator->jobs.emplace_back(nullptr);
            communicator->changed.notify_all();
        }
        communicators_.clear();
    }

    // All ranks of the communicator do the same now, or an error says what each does.
    void agree(const std::string& signature, const std::string& place) {
        std::string text = signature.substr(0, kSignature / 2 - 1);
        std::string where = place.substr(0, kSignature / 2 - 2);
        at::Tensor mine = at::empty({std::int64_t(kSignature)}, at::kByte).fill_(0);
        auto* data = static_cast<char*>(mine.data_ptr());
        std::memcpy(data, text.data(), text.size());
        std::memcpy(data + kSignature / 2, where.data(), where.size());
        at::Tensor all = at::empty({std::int64_t(kSignature) * size_}, at::kByte);
        gloo_->_allgather_base(all, mine)->wait();
        const auto* found = static_cast<const char*>(all.data_ptr());
        bool differs = false;
        std::string report = "ranks of " + name_ + " do not call the same collective:";
        for (int rank = 0; rank < size_; ++rank) {
            const char* theirs = found + std::size_t(rank) * kSignature;
            differs |= text != theirs;
            report += c10::str("\n  rank ", rank, ": ", theirs, ", by ", theirs + kSignature / 2);
        }
        TORCH_CHECK(!differs, report);
    }

    GlooWork launch(
        const std::shared_ptr<Communicator>& communicator, std::vector<Op> ops, bool is_async, OpType type) {
        raise_noticed();
        const StreamNo stream = is_async ? communicator->stream : current_stream();
        if (is_async) {
            stream_waits(stream, clock_of(current_stream()));
        }
        std::string signature, name;
        for (const Op& op : ops) {
            signature += (signature.empty() ? "" : "; ") + op.name + " " + op.signature;
        }
        Launch launched(interned(ops.size() > 1 ? "coalesced collectives" : ops[0].name), stream);
        auto collective = std::make_shared<Collective>();
        collective->stream = stream;
        collective->time = launched.time();
        Tensors inputs, outputs;
        for (Op& op : ops) {
            for (const at::Tensor& tensor : op.inputs) {
                use_tensor(launched, tensor, false);
            }
            for (const at::Tensor& tensor : op.outputs) {
                use_tensor(launched, tensor, true);
            }
            inputs.insert(inputs.end(), op.inputs.begin(), op.inputs.end());
            outputs.insert(outputs.end(), op.outputs.begin(), op.outputs.end());
        }
        for (Op& op : ops) {
            for (const at::Tensor& tensor : op.inputs) {
                op.staged_inputs.push_back(kernel_view_of(tensor).clone());
            }
        }
        for (Op& op : ops) {
            for (const at::Tensor& tensor : op.outputs) {
                at::Tensor seen = kernel_view_of(tensor);
                at::Tensor staged = at::empty_like(seen);
                Block* block = memory_of(tensor.storage().data_ptr()).block;
                if (block != nullptr && staged.nbytes() > 0) {
                    std::memset(seen.data_ptr(), 0xFF, staged.nbytes());
                    const std::size_t low = static_cast<char*>(seen.data_ptr()) - block->memory;
                    collective->add_target(block, low, staged);
                    const auto tables = lock_tables();
                    block->in_flight.push_back({low, low + staged.nbytes(), collective});
                }
                op.staged_outputs.push_back(std::move(staged));
            }
            op.inputs.clear();
            op.outputs.clear();
        }
        collective->ops = std::move(ops);
        add_pending(collective);
        const Clock end = clock_of(stream);
        const std::string place = text_of(launched.place());
        auto work = c10::make_intrusive<SimWork>(
            rank_, type, collective, end, std::move(inputs), std::move(outputs), type == OpType::BARRIER);
        work->sequence = ++sequence_;
        const auto job = [this_ = shared(), communicator, collective, signature, place] {
            collective->run(*communicator, [&] {
                const bool pairs = bool(collective->ops[0].start_pair);
                if (!pairs) {
                    this_->agree(signature, place);
                    for (Op& op : collective->ops) {
                        op.body(op);
                    }
                    return;
                }
                std::vector<GlooWork> works;
                for (const bool sends : {true, false}) {  // receives wait for their headers
                    for (Op& op : collective->ops) {
                        if ((op.type == OpType::SEND) == sends) {
                            for (auto& work : op.start_pair(op)) {
                                works.push_back(std::move(work));
                            }
                        }
                    }
                }
                for (auto& work : works) {
                    work->wait();
                }
            });
        };
        {
            const std::lock_guard<std::mutex> own(communicator->lock);
            communicator->jobs.emplace_back(job);
        }
        communicator->changed.notify_all();
        return work;
    }

    c10::intrusive_ptr<Backend> gloo_;
    std::string name_;
    Milliseconds timeout_;
    c10::intrusive_ptr<Options> options_;
    std::mutex lock_;
    std::map<std::string, std::shared_ptr<Communicator>> communicators_;
    std::vector<Op> coalesced_;
    bool is_coalescing_ = false, is_aborted_ = false;
    std::uint64_t sequence_ = 0;
};

}  // namespace

void bind_group(py::module& module) {
    module.def("make_group", [](int rank, int size, c10::intrusive_ptr<Backend> gloo, const std::string& name, double seconds) {
        return c10::intrusive_ptr<Backend>(
            c10::make_intrusive<Group>(rank, size, std::move(gloo), name, Milliseconds(std::int64_t(seconds * 1e3))));
    });
}

}  // namespace sim
