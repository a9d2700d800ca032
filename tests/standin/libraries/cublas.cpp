// cuBLAS and cuBLASLt: every product has an algorithm, which needs no memory and computes nothing. The
// workspaces that torch gives to them are torch's own and therefore real.

#include <cublasLt.h>

#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

API cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = reinterpret_cast<cublasHandle_t>(new char[16]);
  return CUBLAS_STATUS_SUCCESS;
}
API size_t cublasLtGetVersion() { return 130000; }
API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                                  cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                  cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                  cublasLtMatmulPreference_t, int,
                                                  cublasLtMatmulHeuristicResult_t* results, int* found) {
  std::memset(results, 0, sizeof *results);
  results->state = CUBLAS_STATUS_SUCCESS;
  results->wavesCount = 1;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}
