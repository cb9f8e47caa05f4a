// SPDX-License-Identifier: BSD-3-Clause
//
// serve ENCODER [BATCH] < requests > answers
//
// Serves an encoder that encoder.py exported. A request is a line of token numbers, an answer the line of its vector,
// or "error: " and why; answers come in the order of the requests. What is waiting is taken together, BATCH requests at
// most (64 where none is given), padded to the longest of them, and handed over with its padding mask as it is: (N, S),
// True behind each request's end. Times go to the standard error.
#include <fused_mha/fused_mha.h>  // also links the operators that the encoder calls by name
#include <torch/script.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

struct Request {
  std::vector<std::int64_t> tokens;
  std::string error;  // empty: none
};

struct Encoder {
  torch::jit::Module module;
  std::int64_t vocabulary;
  std::int64_t longest;

  explicit Encoder(const std::string& file)
      : module(torch::jit::load(file)),
        vocabulary(module.attr("vocabulary").toInt()),
        longest(module.attr("longest").toInt()) {
    module.eval();
  }

  /// A request that would make the encoder fail is answered alone, not with the others of its batch.
  Request parse(std::string_view line) const {
    Request request;
    const char* const end = line.data() + line.size();
    for (const char* place = line.data(); place != end;) {
      if (*place == ' ' || *place == '\r') {
        ++place;
        continue;
      }
      std::int64_t token = 0;
      const auto [after, failure] = std::from_chars(place, end, token);
      if (failure != std::errc()) return {{}, "a request must be a line of token numbers"};
      if (token < 0 || token >= vocabulary) {
        return {{}, "a token must be from 0 to " + std::to_string(vocabulary - 1) + ", got " + std::to_string(token)};
      }
      request.tokens.push_back(token);
      place = after;
    }
    const auto length = static_cast<std::int64_t>(request.tokens.size());
    if (length > longest) {
      return {{}, "a request must have at most " + std::to_string(longest) + " tokens, got " + std::to_string(length)};
    }
    return request;
  }

  /// (N, E): a vector for each request. One without tokens gets zeros, since a row that sees no key attends to nothing.
  torch::Tensor operator()(const torch::Tensor& tokens, const torch::Tensor& padding) {
    return module.forward({tokens, padding}).toTensor().contiguous();
  }
};

/// Tokens (N, L), with 0 behind each request's end, and padding (N, L), True there.
std::pair<torch::Tensor, torch::Tensor> pad(const std::vector<Request>& requests) {
  std::size_t longest = 1;
  for (const auto& request : requests) longest = std::max(longest, request.tokens.size());
  const auto N = static_cast<std::int64_t>(requests.size());
  const auto L = static_cast<std::int64_t>(longest);
  torch::Tensor tokens = torch::zeros({N, L}, torch::kLong);
  torch::Tensor padding = torch::ones({N, L}, torch::kBool);
  for (std::int64_t n = 0; n < N; ++n) {
    const auto& given = requests[static_cast<std::size_t>(n)].tokens;
    std::copy(given.begin(), given.end(), tokens.data_ptr<std::int64_t>() + n * L);
    std::fill_n(padding.data_ptr<bool>() + n * L, given.size(), false);
  }
  return {tokens, padding};
}

struct Statistics {
  std::int64_t requests = 0;
  std::int64_t tokens = 0;
  std::int64_t positions = 0;
  std::vector<double> batch_seconds;

  void print(std::ostream& stream) {
    if (batch_seconds.empty()) return;
    double total = 0.0;
    for (const double seconds : batch_seconds) total += seconds;
    const auto middle = batch_seconds.begin() + static_cast<std::ptrdiff_t>(batch_seconds.size() / 2);
    std::nth_element(batch_seconds.begin(), middle, batch_seconds.end());
    stream << requests << " requests in " << batch_seconds.size() << " batches, " << tokens << " tokens in "
           << positions << " positions; " << total << " s in the encoder, " << 1e3 * *middle << " ms a batch (median), "
           << static_cast<double>(requests) / total << " requests a second\n";
  }
};

void append_numbers(std::string& text, const float* numbers, std::int64_t count) {
  char digits[32];
  for (std::int64_t i = 0; i < count; ++i) {
    const auto end = std::to_chars(digits, digits + sizeof(digits), numbers[i]).ptr;  // the shortest that reads back
    if (i > 0) text += ' ';
    text.append(digits, end);
  }
}

void answer(Encoder& encoder, const std::vector<Request>& requests, Statistics& statistics) {
  const auto [tokens, padding] = pad(requests);
  const auto begin = std::chrono::steady_clock::now();
  const torch::Tensor vectors = encoder(tokens, padding);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;

  std::string text;
  for (std::size_t n = 0; n < requests.size(); ++n) {
    if (requests[n].error.empty()) {
      append_numbers(text, vectors.data_ptr<float>() + static_cast<std::int64_t>(n) * vectors.size(1), vectors.size(1));
    } else {
      text += "error: " + requests[n].error;
    }
    text += '\n';
    statistics.tokens += static_cast<std::int64_t>(requests[n].tokens.size());
  }
  std::cout << text << std::flush;
  statistics.requests += static_cast<std::int64_t>(requests.size());
  statistics.positions += tokens.numel();
  statistics.batch_seconds.push_back(seconds.count());
}

int serve(const std::string& file, std::size_t largest_batch) {
  const c10::InferenceMode inference;
  Encoder encoder(file);
  Statistics statistics;
  std::vector<Request> waiting;
  for (std::string line; std::getline(std::cin, line);) {
    waiting.push_back(encoder.parse(line));
    if (waiting.size() < largest_batch && std::cin.rdbuf()->in_avail() > 0) continue;
    answer(encoder, waiting, statistics);
    waiting.clear();
  }
  if (!waiting.empty()) answer(encoder, waiting, statistics);
  statistics.print(std::cerr);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int largest_batch = argc > 2 ? std::atoi(argv[2]) : 64;
  if (argc < 2 || largest_batch < 1) {
    std::cerr << "usage: serve ENCODER [BATCH] < requests > answers\n";
    return 2;
  }
  std::ios::sync_with_stdio(false);
  try {
    return serve(argv[1], static_cast<std::size_t>(largest_batch));
  } catch (const std::exception& error) {  // c10::Error is one
    std::cerr << "serve: " << error.what() << '\n';
    return 1;
  }
}
