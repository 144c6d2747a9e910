"""What Triton compiles the kernels of V2 drafting for, which it tells without a GPU, too."""

from collections import defaultdict

from nemo_specrl.drafting import kernels


def specialization(kernel, args):
    """Types of arguments, which are multiples of 16, and which constants: other ones compile anew.

    Args:
        kernel: compiled or interpreted.
        args: of a launch.
    """
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    if not isinstance(kernel, JITFunction):
        changing = kernel.kwargs["do_not_specialize"]
        kernel = JITFunction(kernel.fn, do_not_specialize=changing)
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return tuple(bind(*args)[1])


class Specializations:
    """Stands for the kernels: launches another module's, and notes what Triton would compile.

    Attributes:
        seen: by name of a kernel, what its launches asked for.
    """

    SCATTERED = kernels.SCATTERED

    def __init__(self, launched):
        self.launched, self.seen = launched, defaultdict(set)

    def __getattr__(self, name):
        kernel, seen = getattr(kernels, name), self.seen[name]
        launched = getattr(self.launched, name)

        class Launch:
            def __getitem__(self, grid):
                def launch(*args):
                    seen.add(specialization(kernel, args))
                    launched[grid](*args)

                return launch

        return Launch()
