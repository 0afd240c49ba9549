from . import recordings as recordings
from . import viz as viz
from .arrays import array as array
from .arrays import empty as empty
from .arrays import empty_like as empty_like
from .arrays import stream as stream
from .arrays import zeros as zeros
from .instrument.device import Array as Array
from .instrument.device import Device as Device
from .instrument.device import Stream as Stream
from .instrument.device import devices as devices
from .instrument.device.preemption import Flag as Flag
from .instrument.errors import (
    ArgumentError as ArgumentError,
)
from .instrument.errors import (
    CompileError as CompileError,
)
from .instrument.errors import (
    InstrumentError as InstrumentError,
)
from .instrument.errors import (
    LaunchError as LaunchError,
)
from .instrument.errors import (
    NoDeviceError as NoDeviceError,
)
from .instrument.errors import (
    OutOfBoundsError as OutOfBoundsError,
)
from .instrument.errors import (
    PaellaError as PaellaError,
)
from .instrument.errors import (
    PtxError as PtxError,
)
from .instrument.errors import (
    TraceError as TraceError,
)
from .instrument.errors import (
    UnsupportedOpError as UnsupportedOpError,
)
from .instrument.errors import (
    ViewWarning as ViewWarning,
)
from .instrument.kernels.cuda_kernel import CudaKernel as CudaKernel
from .instrument.kernels.decorator import kernel as kernel
from .instrument.kernels.kernel import Kernel as Kernel
from .instrument.kernels.preempt import PreemptibleLaunch as PreemptibleLaunch
from .instrument.kernels.ranges import range as range
from .instrument.kernels.ranges import range_begin as range_begin
from .instrument.kernels.ranges import range_end as range_end
from .instrument.kernels.torch_hook import instrument_torch as instrument_torch
from .instrument.kernels.triton_kernel import TritonKernel as TritonKernel
from .instrument.kernels.turnaround import Turnaround as Turnaround
from .instrument.traces.live import Counts as Counts
from .instrument.traces.live import counts as counts
from .instrument.traces.trace import Trace as Trace
from .instrument.traces.tracing import trace as trace
from .scheduler.core.profiles import (
    ModelProfile as ModelProfile,
)
from .scheduler.core.profiles import (
    load_profiles as load_profiles,
)
from .scheduler.core.profiles import (
    save_profiles as save_profiles,
)
from .scheduler.core.tenants import Tenant as Tenant
from .scheduler.core.tuning import Tuning as Tuning
from .scheduler.engine.engine import Engine as Engine
from .scheduler.models.model import Model as Model
from .scheduler.models.model import TensorSpec as TensorSpec
from .scheduler.policies.policy import Policy as Policy
from .scheduler.policies.policy import policy as policy
from .scheduler.policies.policy import policy_names as policy_names
from .scheduler.policies.roles import Where as Where
from .scheduler.sim.cluster import Failure as Failure
from .scheduler.sim.cluster import Straggler as Straggler
from .scheduler.sim.cluster import simulate_cluster as simulate_cluster
from .scheduler.sim.trace_workload import TraceWorkload as TraceWorkload
from .scheduler.sim.training import training_profiles as training_profiles
from .scheduler.sim.tune import Tuned as Tuned
from .scheduler.sim.tune import tune as tune
from .scheduler.sim.workload import (
    Background as Background,
)
from .scheduler.sim.workload import (
    ClosedLoop as ClosedLoop,
)
from .scheduler.sim.workload import (
    Lognormal as Lognormal,
)
from .scheduler.sim.workload import (
    Poisson as Poisson,
)
from .serving.api import serve as serve
from .simulation import simulate as simulate
from .viz import MissingExtraError as MissingExtraError
from .viz import compare as compare
from .viz import live as live
