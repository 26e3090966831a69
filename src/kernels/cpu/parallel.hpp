// Splits [0, items) over threads. Chunks are contiguous and fixed by (threads, items, min_items) alone, and
// workers share no results, so what comes out does not depend on the number of threads.
//
// Threads are started per call: starting and joining one takes 30 us (median on a two-core EPYC machine,
// 2026-11-29), so min_items should stand for at least ~50 us of work. The nanoseconds callers put in are estimates.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace kdt::cpu {

// body(begin, end, worker) must not throw; worker is 0..threads-1, one chunk each. Never throws itself: threads
// that cannot be had (no memory, a limit of the system) leave their work to the caller's.
template <class Body>
void parallel_for(int32_t threads, int64_t items, int64_t min_items, Body&& body) {
  const int64_t workers = std::min<int64_t>(threads, items / std::max<int64_t>(min_items, 1));
  if (workers <= 1) {
    body(int64_t{0}, items, int64_t{0});
    return;
  }
  const auto chunk_begin = [&](int64_t worker) {
    return items / workers * worker + std::min(worker, items % workers);
  };
  std::vector<std::jthread> pool;  // joins when it goes out of scope
  int64_t started = 0;
  try {
    pool.reserve(static_cast<size_t>(workers - 1));
    for (; started < workers - 1; ++started) {
      pool.emplace_back([&body, begin = chunk_begin(started), end = chunk_begin(started + 1), worker = started] {
        body(begin, end, worker);
      });
    }
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  body(chunk_begin(started), items, started);
}

}  // namespace kdt::cpu
