"""A simulated Ascend NPU around the real torch_npu wheel.

torch_npu is imported as it is: its operator schemas, Meta kernels, caching allocator, streams, events, graphs and
process groups are the real ones. What CANN would bring is replaced: the runtime and HCCL by C on host memory
(``runtime.c``, ``collectives.c``), the kernels by CPU references that also hold each call to the documented limits
(``operators``). ``install_on_import`` arranges that a plain ``import torch_npu`` does all that.

It detects wrong arguments, shapes, dtypes, numbers, lengths, and reads that no event orders. It cannot show a kernel's
precision or speed, nor limits that the documentation does not state.

Environment: SIMULATED_NPU_WHEEL (folder with the installed wheel), SIMULATED_NPU_CACHE (where libraries are built),
SIMULATED_NPU_DEVICES, SIMULATED_NPU_MEMORY_MB, SIMULATED_NPU_LOG_LEVEL (0 debug to 3 error).
"""
