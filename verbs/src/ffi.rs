//! libibverbs and librdmacm as far as they are needed: types as in their public headers
//! (rdma-core 44; the ABI has been stable since 1.1), functions found when the library is loaded,
//! so that neither headers nor libraries are needed to build, nor to run without RDMA.

#![allow(missing_docs)]

use libc::{c_char, c_int, c_uint, c_void, sockaddr};
pub use ringsock_core::provider::{Completion as Wc, Piece as Sge, Request as SendWr};

/// Declares an opaque type of the libraries.
macro_rules! opaque { ($($n:ident),*) => { $(#[repr(C)] pub struct $n { _private: [u8; 0] })* } }
opaque!(Device, Pd);

type PollCq = unsafe extern "C" fn(*mut c_void, c_int, *mut Wc) -> c_int;
type ReqNotify = unsafe extern "C" fn(*mut Cq, c_int) -> c_int;
type PostSend = unsafe extern "C" fn(*mut c_void, *mut SendWr, *mut *mut SendWr) -> c_int;
type PostRecv = unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int;

/// `struct ibv_context` with the driver's functions, of which four are called directly, as the
/// header's inline functions do.
#[repr(C)]
pub struct Context {
    pub device: *mut Device,
    _ops0: [*mut c_void; 10],
    _ops10: *mut c_void,
    pub poll_cq: PollCq,
    pub req_notify_cq: ReqNotify,
    _ops13: [*mut c_void; 12],
    pub post_send: PostSend,
    pub post_recv: PostRecv,
    _ops27: [*mut c_void; 5],
    pub cmd_fd: c_int,
    pub async_fd: c_int,
}

#[repr(C)]
pub struct CompChannel {
    pub context: *mut Context,
    pub fd: c_int,
    pub refcnt: c_int,
}

#[repr(C)]
pub struct Cq {
    pub context: *mut Context,
    pub channel: *mut CompChannel,
    pub cq_context: *mut c_void,
}

#[repr(C)]
pub struct Qp {
    pub context: *mut Context,
    pub qp_context: *mut c_void,
}

#[repr(C)]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub cap: QpCap,
    pub qp_type: c_uint,
    pub sq_sig_all: c_int,
}

/// `struct ibv_device_attr`, of which only some fields are read.
#[repr(C, align(8))]
pub struct DeviceAttr {
    pub fw_ver: [c_char; 64],
    pub guids: [u64; 2],
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor: [u32; 3],
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub _rest: [u32; 20],
    pub _tail: [u8; 3],
    pub phys_port_cnt: u8,
    pub _end: [u8; 4],
    /// Room for newer versions.
    pub _more: [u64; 16],
}

#[repr(C, align(8))]
pub struct PortAttr {
    pub state: c_uint,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub bytes: [u8; 8],
    pub link_layer: u8,
    pub flags: u8,
    pub _more: [u64; 8],
}

#[repr(C)]
pub struct AsyncEvent {
    pub element: *mut c_void,
    pub event_type: c_uint,
}

#[repr(C)]
pub struct CmChannel {
    pub fd: c_int,
}

/// `struct rdma_cm_id` up to its port number.
#[repr(C)]
pub struct CmId {
    pub verbs: *mut Context,
    pub channel: *mut CmChannel,
    pub context: *mut c_void,
    pub qp: *mut Qp,
    pub src: libc::sockaddr_storage,
    pub dst: libc::sockaddr_storage,
    _route: [u64; 7],
    _ps: c_uint,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ConnParam {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

#[repr(C)]
pub struct CmEvent {
    pub id: *mut CmId,
    pub listen_id: *mut CmId,
    pub event: c_uint,
    pub status: c_int,
    pub conn: ConnParam,
}

const _: () = {
    assert!(core::mem::offset_of!(Context, poll_cq) == 96 && core::mem::offset_of!(Context, post_send) == 208);
    assert!(core::mem::offset_of!(Context, cmd_fd) == 264 && core::mem::offset_of!(Context, async_fd) == 268);
    assert!(size_of::<QpInitAttr>() == 64);
    assert!(core::mem::offset_of!(DeviceAttr, max_qp) == 108 && core::mem::offset_of!(DeviceAttr, max_cqe) == 132);
    assert!(core::mem::offset_of!(DeviceAttr, phys_port_cnt) == 227);
    assert!(core::mem::offset_of!(PortAttr, lid) == 34 && core::mem::offset_of!(PortAttr, link_layer) == 46);
    assert!(core::mem::offset_of!(CmId, src) == 32 && core::mem::offset_of!(CmId, port_num) == 348);
    assert!(core::mem::offset_of!(CmEvent, conn) == 24 && size_of::<ConnParam>() == 24);
    assert!(core::mem::offset_of!(Mr, rkey) == 40);
};

pub const ACCESS_LOCAL_WRITE: c_int = 1;
pub const ACCESS_REMOTE_WRITE: c_int = 2;
pub const WR_WRITE: c_uint = 0;
pub const WR_SEND_WITH_IMM: c_uint = 3;
pub const QPT_RC: c_uint = 2;
pub const PS_TCP: c_uint = 0x106;
pub const EVENT_DEVICE_FATAL: c_uint = 8;
pub const EVENT_QP_FATAL: c_uint = 1;
pub const EVENT_QP_ACCESS_ERR: c_uint = 3;

/// Events of librdmacm.
pub mod cm {
    pub const ADDR_RESOLVED: u32 = 0;
    pub const ROUTE_RESOLVED: u32 = 2;
    pub const CONNECT_REQUEST: u32 = 4;
    pub const ADDR_ERROR: u32 = 1;
    pub const ROUTE_ERROR: u32 = 3;
    pub const CONNECT_ERROR: u32 = 6;
    pub const UNREACHABLE: u32 = 7;
    pub const REJECTED: u32 = 8;
    pub const ESTABLISHED: u32 = 9;
    pub const DISCONNECTED: u32 = 10;
    pub const DEVICE_REMOVAL: u32 = 11;
}

macro_rules! functions {
    ($([$lib:ident] $($name:ident($($t:ty),*) $(-> $r:ty)?;)*)*) => {
        /// The libraries' functions.
        pub struct Lib { $($(pub $name: unsafe extern "C" fn($($t),*) $(-> $r)?,)*)* }
        impl Lib {
            /// Loads the libraries. The error is what is missing.
            pub fn load() -> Result<Lib, &'static str> {
                $(let $lib = open(names::$lib)?;)*
                Ok(Lib { $($($name: {
                    // SAFETY: a handle of dlopen and a NUL-terminated name.
                    let p = unsafe { libc::dlsym($lib, concat!(stringify!($name), "\0").as_ptr().cast()) };
                    if p.is_null() {
                        return Err(concat!("the RDMA libraries lack ", stringify!($name)));
                    }
                    // SAFETY: the function's type is that of the header.
                    unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($t),*) $(-> $r)?>(p) }
                },)*)* })
            }
        }
    };
}

mod names {
    use core::ffi::CStr;
    pub const VERBS: &CStr = c"libibverbs.so.1";
    pub const RDMACM: &CStr = c"librdmacm.so.1";
}

fn open(name: &'static core::ffi::CStr) -> Result<*mut c_void, &'static str> {
    // SAFETY: a NUL-terminated name; a system library's initialisers.
    let h = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    match (h.is_null(), name == names::VERBS) {
        (false, _) => Ok(h),
        (true, true) => Err("libibverbs.so.1 cannot be loaded"),
        (true, false) => Err("librdmacm.so.1 cannot be loaded"),
    }
}

#[allow(non_snake_case)]
mod bound {
    use super::*;
    functions! {
        [VERBS]
        ibv_get_device_list(*mut c_int) -> *mut *mut Device;
        ibv_free_device_list(*mut *mut Device);
        ibv_get_device_name(*mut Device) -> *const c_char;
        ibv_open_device(*mut Device) -> *mut Context;
        ibv_close_device(*mut Context) -> c_int;
        ibv_query_device(*mut Context, *mut DeviceAttr) -> c_int;
        ibv_query_port(*mut Context, u8, *mut PortAttr) -> c_int;
        ibv_alloc_pd(*mut Context) -> *mut Pd;
        ibv_dealloc_pd(*mut Pd) -> c_int;
        ibv_reg_mr(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
        ibv_dereg_mr(*mut Mr) -> c_int;
        ibv_create_comp_channel(*mut Context) -> *mut CompChannel;
        ibv_destroy_comp_channel(*mut CompChannel) -> c_int;
        ibv_create_cq(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
        ibv_destroy_cq(*mut Cq) -> c_int;
        ibv_get_cq_event(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events(*mut Cq, c_uint);
        ibv_get_async_event(*mut Context, *mut AsyncEvent) -> c_int;
        ibv_ack_async_event(*mut AsyncEvent);
        [RDMACM]
        rdma_create_event_channel() -> *mut CmChannel;
        rdma_destroy_event_channel(*mut CmChannel);
        rdma_create_id(*mut CmChannel, *mut *mut CmId, *mut c_void, c_uint) -> c_int;
        rdma_destroy_id(*mut CmId) -> c_int;
        rdma_bind_addr(*mut CmId, *mut sockaddr) -> c_int;
        rdma_listen(*mut CmId, c_int) -> c_int;
        rdma_resolve_addr(*mut CmId, *mut sockaddr, *mut sockaddr, c_int) -> c_int;
        rdma_resolve_route(*mut CmId, c_int) -> c_int;
        rdma_create_qp(*mut CmId, *mut Pd, *mut QpInitAttr) -> c_int;
        rdma_destroy_qp(*mut CmId);
        rdma_connect(*mut CmId, *mut ConnParam) -> c_int;
        rdma_accept(*mut CmId, *mut ConnParam) -> c_int;
        rdma_reject(*mut CmId, *const c_void, u8) -> c_int;
        rdma_disconnect(*mut CmId) -> c_int;
        rdma_get_cm_event(*mut CmChannel, *mut *mut CmEvent) -> c_int;
        rdma_ack_cm_event(*mut CmEvent) -> c_int;
        rdma_set_option(*mut CmId, c_int, c_int, *mut c_void, usize) -> c_int;
    }
}
pub use bound::Lib;
