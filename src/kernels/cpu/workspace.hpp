// Where in a caller's workspace, which may have any alignment, our scratch begins.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kdt::cpu {

// Whole cache lines: threads share none, and every type of ours is aligned.
inline constexpr size_t kWorkspaceAlign = 64;

inline constexpr size_t round_up(size_t bytes) {
  return (bytes + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
}

// What to ask for when `bytes` are needed.
inline constexpr size_t workspace_for(size_t bytes) { return kWorkspaceAlign - 1 + bytes; }

inline std::byte* workspace_begin(void* workspace) {
  return reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(workspace)));
}

}  // namespace kdt::cpu
