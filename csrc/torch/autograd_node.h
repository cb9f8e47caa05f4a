// SPDX-License-Identifier: BSD-3-Clause
//
// How PyTorch holds the nodes of its graph: std::shared_ptr with a deleter of its own up to 2.14 or so, then
// c10::intrusive_ptr with hooks that fire at creation. Told apart by type, not by version number.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>

namespace fused_mha::detail {

using NodePointer = decltype(torch::autograd::Edge::function);

inline constexpr bool kNodesAreShared = std::is_same_v<NodePointer, std::shared_ptr<torch::autograd::Node>>;

/// A node of type T, as NodePointer or a pointer that converts to it.
template <typename T>
auto make_node() {
  if constexpr (kNodesAreShared) {
    return std::shared_ptr<T>(new T(), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>();
  }
}

/// To be called once the node has its edges and the outputs their history; nothing where PyTorch has no such hooks.
template <typename Pointer>
void announce_node(const Pointer& node) {
  if constexpr (requires { fire_node_creation_hooks(node); }) fire_node_creation_hooks(node);
}

}  // namespace fused_mha::detail
