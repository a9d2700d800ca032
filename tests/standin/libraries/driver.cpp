// libcuda, which torch opens to ask whether a device has a context. The rest succeeds.

#define API extern "C" __attribute__((visibility("default")))

API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
API int cuCtxGetCurrent(void** context) {
  static char any;
  *context = &any;
  return 0;
}
API int cuGetErrorString(int, const char** text) {
  *text = "an error";
  return 0;
}
