//! Queue pairs: what is registered for them, posted to them and heard from them.

use crate::context::{errno, Ear, Id};
use crate::driver;
use crate::ffi::{self, QpCap, QpInitAttr, RecvWr, SendWr, Sge, Wc};
use crate::host;
use libc::{c_int, c_void};
use ringsock_core::provider::{self, Channel, Direct, Done, Limits, Memory, Write};
use std::mem::MaybeUninit;
use std::ptr::null_mut;

/// A lost packet is noticed after 4.096 µs times 2 to this power (67 ms) ...
const ACK_TIMEOUT: u8 = 14;

pub unsafe extern "C" fn open(id: *mut c_void, writes: u32, receives: u32, token: u64, to: *mut Limits) -> c_int {
    // SAFETY: an id of ours, used by the background thread alone until it is open.
    let (ptr, id) = (id.cast::<Id>(), unsafe { &mut *id.cast::<Id>() });
    // SAFETY: the context outlives its ids.
    let ctx = unsafe { &mut *id.ctx };
    // SAFETY: a live id.
    let verbs = unsafe { (*id.cm).verbs };
    if verbs.is_null() {
        return libc::ENODEV;
    }
    let Some(dev) = ctx.use_dev(verbs) else { return errno() };
    id.dev = dev;
    // SAFETY: live objects throughout; what is made is destroyed by `close`.
    unsafe {
        let mut attr: ffi::DeviceAttr = core::mem::zeroed();
        if (ctx.lib.ibv_query_device)(verbs, &mut attr) != 0 {
            return errno();
        }
        let most = attr.max_qp_wr.max(16) as u32;
        let (writes, receives) = (writes.min(most), receives.min(most));
        id.pd = (ctx.lib.ibv_alloc_pd)(verbs);
        if id.pd.is_null() {
            return errno();
        }
        let cqe = ((writes + receives) as c_int).min(attr.max_cqe);
        id.cq = (ctx.lib.ibv_create_cq)(verbs, cqe, token as *mut c_void, (*(*dev).ear).channel, 0);
        if id.cq.is_null() {
            return errno();
        }
        // How much can be sent inline cannot be asked: it is tried, from much to little.
        for inline in [256, 128, 64, 0] {
            let cap = QpCap {
                max_send_wr: writes,
                max_recv_wr: receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            };
            let mut init = QpInitAttr {
                qp_context: null_mut(),
                send_cq: id.cq,
                recv_cq: id.cq,
                srq: null_mut(),
                cap,
                qp_type: ffi::QPT_RC,
                sq_sig_all: 0,
            };
            if (ctx.lib.rdma_create_qp)(id.cm, id.pd, &mut init) == 0 {
                // Option 3 of level 0 is the acknowledgement timeout; older kernels do not have it.
                let mut timeout = ACK_TIMEOUT;
                (ctx.lib.rdma_set_option)(id.cm, 0, 3, (&raw mut timeout).cast(), 1);
                id.token = token;
                ctx.open.push(ptr);
                to.write(Limits {
                    writes: init.cap.max_send_wr.min(writes),
                    inline: init.cap.max_inline_data,
                    software: host::is_software(&ctx.name_of(verbs)).into(),
                });
                return 0;
            }
        }
    }
    errno()
}

pub unsafe extern "C" fn channel(id: *mut c_void, to: *mut Channel) {
    // SAFETY: an open id of ours, so it has a device with a channel.
    unsafe {
        let ear = (*(*id.cast::<Id>()).dev).ear;
        to.write(Channel { fd: (*(*ear).channel).fd, handle: ear.cast() });
    }
}

pub unsafe extern "C" fn direct(id: *mut c_void, to: *mut Direct) {
    // SAFETY: an open id of ours; what is told of lives until it is closed.
    unsafe {
        let id = &*id.cast::<Id>();
        let qp = (*id.cm).qp;
        to.write(Direct {
            qp: qp.cast(),
            cq: id.cq.cast(),
            post: &raw const (*(*qp).context).post_send,
            poll: &raw const (*(*id.cq).context).poll_cq,
            quiet: (*id.dev).quiet.into(),
            restore: driver::restore,
        });
    }
}

pub unsafe extern "C" fn heard(channel: *mut c_void, to: *mut u64) -> c_int {
    let (mut cq, mut token) = (null_mut(), null_mut());
    // SAFETY: a channel that is not buried yet. The event is acknowledged at once: until then the queue that it
    // names is not destroyed.
    unsafe {
        let c = &*channel.cast::<Ear>();
        if (c.get)(c.channel, &mut cq, &mut token) != 0 {
            return 0;
        }
        (c.ack)(cq, 1);
        to.write(token as u64);
    }
    1
}

pub unsafe extern "C" fn register(id: *mut c_void, at: *mut u8, len: usize, remote: c_int, to: *mut Memory) -> c_int {
    // SAFETY: an open id of ours; registrations are the background thread's.
    let id = unsafe { &mut *id.cast::<Id>() };
    let access = if remote != 0 { ffi::ACCESS_LOCAL_WRITE | ffi::ACCESS_REMOTE_WRITE } else { 0 };
    // SAFETY: the memory is the caller's, and lives until the id is closed.
    unsafe {
        let mr = ((*id.ctx).lib.ibv_reg_mr)(id.pd, at.cast(), len, access);
        if mr.is_null() {
            return errno();
        }
        id.memory.push(mr);
        to.write(Memory { handle: mr.cast(), lkey: (*mr).lkey, rkey: (*mr).rkey });
    }
    0
}

pub unsafe extern "C" fn forget(_handle: *mut c_void) {
    // Registrations end with their queue pair.
}

/// Writes that go to the device in one call.
const LIST: usize = 16;

fn opcode(flags: u32) -> libc::c_uint {
    match flags & (provider::SEND | provider::UNTOLD) {
        0 => provider::WRITE_WITH_IMM,
        provider::UNTOLD => ffi::WR_WRITE,
        _ => ffi::WR_SEND_WITH_IMM,
    }
}

fn sge_of(w: &Write) -> Sge {
    Sge { addr: w.from, length: w.len, lkey: w.lkey }
}

/// A write as libibverbs wants it, with its memory, before the next one of a list.
#[inline]
fn request(w: &Write, sg_list: *mut Sge, next: *mut SendWr) -> SendWr {
    SendWr {
        wr_id: w.id,
        next,
        sg_list,
        num_sge: (w.len > 0) as c_int,
        opcode: opcode(w.flags),
        send_flags: w.flags & (provider::SIGNALED | provider::INLINE | provider::SOLICITED),
        imm_data: w.imm.to_be(),
        remote_addr: w.to,
        rkey: w.rkey,
        rest: [0; 9],
    }
}

pub unsafe extern "C" fn post(id: *mut c_void, list: *const Write, n: u32) -> c_int {
    // SAFETY: an open id of ours, and `n` readable writes.
    let (id, list) = unsafe { (&*id.cast::<Id>(), std::slice::from_raw_parts(list, n as usize)) };
    // SAFETY: live objects.
    let (qp, post_send) = unsafe { ((*id.cm).qp.cast(), (*(*(*id.cm).qp).context).post_send) };
    if let [w] = list {
        let mut sge = sge_of(w);
        let mut wr = request(w, &mut sge, null_mut());
        let mut bad = null_mut();
        // SAFETY: a valid request whose memory is registered.
        let r = unsafe { post_send(qp, &mut wr, &mut bad) };
        return if r == 0 { 0 } else { r.abs().max(1) };
    }
    for part in list.chunks(LIST) {
        let mut sge = [const { MaybeUninit::<Sge>::uninit() }; LIST];
        let mut wr = [const { MaybeUninit::<SendWr>::uninit() }; LIST];
        for (i, w) in part.iter().enumerate() {
            sge[i].write(sge_of(w));
            let next = if i + 1 < part.len() { wr[i + 1].as_mut_ptr() } else { null_mut() };
            wr[i].write(request(w, sge[i].as_mut_ptr(), next));
        }
        let mut bad = null_mut();
        // SAFETY: a list of valid requests whose memory is registered.
        let r = unsafe { post_send(qp, wr.as_mut_ptr().cast::<SendWr>(), &mut bad) };
        if r != 0 {
            return r.abs().max(1);
        }
    }
    0
}

pub unsafe extern "C" fn post_recv(id: *mut c_void, n: u32) -> c_int {
    // SAFETY: an open id of ours.
    let id = unsafe { &*id.cast::<Id>() };
    // SAFETY: live objects.
    let (qp, post_recv) = unsafe { ((*id.cm).qp, (*(*(*id.cm).qp).context).post_recv) };
    let mut left = n as usize;
    while left > 0 {
        let part = left.min(LIST);
        let mut wr = [RecvWr { wr_id: 0, next: null_mut(), sg_list: null_mut(), num_sge: 0 }; LIST];
        for i in 0..part - 1 {
            wr[i].next = &raw mut wr[i + 1];
        }
        let mut bad = null_mut();
        // SAFETY: a list of valid requests without memory: what arrives is written by the peer.
        let r = unsafe { post_recv(qp, wr.as_mut_ptr(), &mut bad) };
        if r != 0 {
            return r.abs().max(1);
        }
        left -= part;
    }
    0
}

pub unsafe extern "C" fn poll(id: *mut c_void, to: *mut Done, n: c_int) -> c_int {
    // SAFETY: an open id of ours.
    let cq = unsafe { (*id.cast::<Id>()).cq };
    // Mostly there is nothing, so nothing is cleared before it is known.
    let mut wc = [const { MaybeUninit::<Wc>::uninit() }; 32];
    // SAFETY: a live queue and room for as many completions as are asked for.
    let got = unsafe { ((*(*cq).context).poll_cq)(cq.cast(), n.clamp(0, 32), wc.as_mut_ptr().cast()) };
    for (i, w) in wc.iter().enumerate().take(got.max(0) as usize) {
        // SAFETY: written by the device's driver.
        let w = unsafe { w.assume_init_ref() };
        let d = Done {
            id: w.wr_id,
            status: w.status,
            received: w.is_received().into(),
            len: w.byte_len,
            imm: u32::from_be(w.imm_data),
        };
        // SAFETY: the caller has room for `n`.
        unsafe { to.add(i).write(d) };
    }
    got
}

pub unsafe extern "C" fn arm(id: *mut c_void, solicited: c_int) -> c_int {
    // SAFETY: an open id of ours.
    unsafe {
        let cq = (*id.cast::<Id>()).cq;
        ((*(*cq).context).req_notify_cq)(cq, solicited)
    }
}
