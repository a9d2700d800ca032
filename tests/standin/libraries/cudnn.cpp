// cuDNN: every operation has one engine, which takes no workspace and computes nothing.
//
// Descriptors keep what is put into them, which is what torch asks back. An LSTM's reserve is the least
// that its backward needs: gates, cells and outputs of every layer; cuDNN's own is larger by what only a device can tell.

#include <cudnn.h>

#include <cstring>
#include <map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

size_t width_of(cudnnDataType_t type) {
  return type == CUDNN_DATA_DOUBLE || type == CUDNN_DATA_INT64 ? 8
         : type == CUDNN_DATA_HALF || type == CUDNN_DATA_BFLOAT16 ? 2
                                                                  : 4;
}

struct Described {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::vector<int> dims, strides;
};

struct Recurrent {
  int gates, inputs, hidden, layers, directions;
  cudnnDataType_t type;
};

struct Sequences {
  int length, batch;
};

struct Descriptor {
  cudnnBackendDescriptorType_t type;
  std::map<int, std::vector<char>> values;
};

template <typename Made, typename Handle>
cudnnStatus_t make(Handle* handle) {
  *handle = reinterpret_cast<Handle>(new Made());
  return CUDNN_STATUS_SUCCESS;
}

template <typename Kept, typename Handle>
Kept& kept(Handle handle) {
  return *reinterpret_cast<Kept*>(const_cast<void*>(static_cast<const void*>(handle)));
}

void describe(void* handle, cudnnDataType_t type, std::vector<int> dims) {
  if (!handle) return;  // the caller does not ask for this one
  auto& found = *static_cast<Described*>(handle);
  found.type = type;
  found.dims = dims;
  found.strides.assign(dims.size(), 1);
  for (int i = int(dims.size()) - 2; i >= 0; --i) found.strides[i] = found.strides[i + 1] * dims[i + 1];
}

// Numbers of one layer's matrices for the input and for the hidden state.
size_t columns(const Recurrent& rnn, int layer, bool of_input) {
  const bool first = layer < rnn.directions;
  return of_input ? (first ? rnn.inputs : rnn.hidden * rnn.directions) : rnn.hidden;
}

size_t matrices(const Recurrent& rnn, int layers) {
  size_t sum = 0;
  for (int layer = 0; layer < layers; ++layer)
    sum += size_t(rnn.gates) * rnn.hidden * (columns(rnn, layer, true) + columns(rnn, layer, false));
  return sum;
}

}  // namespace

API size_t cudnnGetVersion() { return CUDNN_VERSION; }
API size_t cudnnGetCudartVersion() { return 13000; }
API const char* cudnnGetErrorString(cudnnStatus_t) { return "an error"; }
API cudnnStatus_t cudnnGetProperty(libraryPropertyType which, int* value) {
  *value = which == MAJOR_VERSION ? CUDNN_MAJOR : which == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) { return make<char>(handle); }

// ------------------------------------------------------------------------------------- descriptors

API cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* made) {
  return make<Described>(made);
}
API cudnnStatus_t cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t* made) {
  return make<Described>(made);
}
API cudnnStatus_t cudnnCreateRNNDescriptor(cudnnRNNDescriptor_t* made) { return make<Recurrent>(made); }
API cudnnStatus_t cudnnCreateRNNDataDescriptor(cudnnRNNDataDescriptor_t* made) {
  return make<Sequences>(made);
}
API cudnnStatus_t cudnnCreateDropoutDescriptor(cudnnDropoutDescriptor_t* made) {
  return make<Described>(made);
}
API cudnnStatus_t cudnnCreateActivationDescriptor(cudnnActivationDescriptor_t* made) {
  return make<Described>(made);
}
API cudnnStatus_t cudnnCreateConvolutionDescriptor(cudnnConvolutionDescriptor_t* made) {
  return make<Described>(made);
}
API cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t made, cudnnDataType_t type, int number,
                                             const int dims[], const int strides[]) {
  auto& found = kept<Described>(made);
  found.type = type;
  found.dims.assign(dims, dims + number);
  found.strides.assign(strides, strides + number);
  return CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t made, int most,
                                             cudnnDataType_t* type, int* number, int dims[], int strides[]) {
  const auto& found = kept<Described>(made);
  *type = found.type;
  *number = int(found.dims.size());
  for (int i = 0; i < most && i < *number; ++i) {
    dims[i] = found.dims[i];
    strides[i] = found.strides[i];
  }
  return CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t, size_t* size) {
  *size = 0;
  return CUDNN_STATUS_SUCCESS;
}

// ------------------------------------------------------------------------------------ batch norm

API cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnActivationDescriptor_t, size_t* size) {
  *size = 0;
  return CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t,
    size_t* size) {
  *size = 0;
  return CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnActivationDescriptor_t,
    const cudnnTensorDescriptor_t, size_t* size) {
  *size = 0;
  return CUDNN_STATUS_SUCCESS;
}

// --------------------------------------------------------------------------------- recurrent layers

API cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t made, cudnnRNNAlgo_t, cudnnRNNMode_t mode,
                                           cudnnRNNBiasMode_t, cudnnDirectionMode_t direction,
                                           cudnnRNNInputMode_t, cudnnDataType_t type, cudnnDataType_t,
                                           cudnnMathType_t, int32_t inputs, int32_t hidden, int32_t,
                                           int32_t layers, cudnnDropoutDescriptor_t, uint32_t) {
  kept<Recurrent>(made) = {mode == CUDNN_LSTM ? 4 : mode == CUDNN_GRU ? 3 : 1, inputs, hidden, layers,
                           direction == CUDNN_BIDIRECTIONAL ? 2 : 1, type};
  return CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t made, cudnnDataType_t,
                                            cudnnRNNDataLayout_t, int length, int batch, int, const int[],
                                            void*) {
  kept<Sequences>(made) = {length, batch};
  return CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t, cudnnRNNDescriptor_t made, size_t* size) {
  const auto& rnn = kept<Recurrent>(made);
  const int layers = rnn.layers * rnn.directions;
  *size = width_of(rnn.type) * (matrices(rnn, layers) + size_t(layers) * rnn.gates * 2 * rnn.hidden);
  return CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t, cudnnRNNDescriptor_t made, int32_t layer, size_t,
                                          const void* space, int32_t number, cudnnTensorDescriptor_t matrix,
                                          void** matrix_at, cudnnTensorDescriptor_t bias, void** bias_at) {
  const auto& rnn = kept<Recurrent>(made);
  const bool of_input = number < rnn.gates;
  const size_t gate = size_t(number % rnn.gates), hidden = size_t(rnn.hidden);
  size_t before = matrices(rnn, layer) + gate * hidden * columns(rnn, layer, of_input);
  if (!of_input) before += rnn.gates * hidden * columns(rnn, layer, true);
  const size_t biases =
      matrices(rnn, rnn.layers * rnn.directions) + (size_t(layer) * 2 * rnn.gates + number) * hidden;
  char* start = static_cast<char*>(const_cast<void*>(space));
  if (matrix_at) *matrix_at = start + before * width_of(rnn.type);
  if (bias_at) *bias_at = start + biases * width_of(rnn.type);
  describe(matrix, rnn.type, {1, rnn.hidden, int(columns(rnn, layer, of_input))});
  describe(bias, rnn.type, {1, rnn.hidden, 1});
  return CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t, cudnnRNNDescriptor_t made, cudnnForwardMode_t mode,
                                            cudnnRNNDataDescriptor_t data, size_t* workspace,
                                            size_t* reserve) {
  const auto& rnn = kept<Recurrent>(made);
  const auto& sequences = kept<Sequences>(data);
  const size_t states = size_t(sequences.length) * sequences.batch * rnn.hidden * rnn.layers * rnn.directions;
  if (workspace) *workspace = 0;
  if (reserve)
    *reserve = mode == CUDNN_FWD_MODE_TRAINING ? width_of(rnn.type) * states * (rnn.gates + 2) : 0;
  return CUDNN_STATUS_SUCCESS;
}

// ------------------------------------------------------------------------------- graphs and engines

API cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                               cudnnBackendDescriptor_t* made) {
  auto* descriptor = new Descriptor();
  descriptor->type = type;
  *made = descriptor;
  return CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t made) {
  delete static_cast<Descriptor*>(made);
  return CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const, cudnnBackendAttributeName_t name,
                                           cudnnBackendAttributeType_t type, int64_t requested,
                                           int64_t* count, void* values) {
  const bool is_number = type == CUDNN_TYPE_INT64;
  const int64_t number = name == CUDNN_ATTR_ENGINEHEUR_RESULTS || is_number ? 1 : 0;
  if (count) *count = number;
  if (values && is_number && requested > 0) std::memset(values, 0, 8);
  return CUDNN_STATUS_SUCCESS;
}
