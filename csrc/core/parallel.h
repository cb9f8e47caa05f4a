// SPDX-License-Identifier: BSD-3-Clause
//
// The parallel loop is injected: the kernels know nothing of the thread pool that runs them.
#pragma once

#include <cstdint>
#include <functional>

namespace fused_mha::core {

struct Parallel {
  /// Threads worth splitting work for. Never changes a result, only the schedule.
  int threads = 1;
  /// Calls body(worker) for every worker in [0, workers), possibly at the same time, and returns when all are done.
  /// An exception thrown by a body reaches the caller.
  std::function<void(int workers, const std::function<void(int worker)>& body)> run =
      [](int workers, const std::function<void(int)>& body) {
        for (int worker = 0; worker < workers; ++worker) body(worker);
      };
};

}  // namespace fused_mha::core
