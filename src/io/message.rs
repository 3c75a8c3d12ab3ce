//! What `recvmsg` says of a message besides its bytes.

use super::*;
use crate::copy;

/// Says what the kernel says; not for a call that fails, of which it says nothing.
pub(super) fn tell_message(m: &mut msghdr, flags: c_int, fd: c_int, conn: Option<&Conn>) {
    if !m.msg_name.is_null() {
        m.msg_namelen = 0;
    }
    m.msg_flags = flags & libc::MSG_CMSG_CLOEXEC;
    let room = core::mem::replace(&mut m.msg_controllen, 0);
    let tells = match conn.filter(|c| matches!(c.phase(), Phase::Managed | Phase::Away)) {
        Some(c) => c.inq.load(Relaxed),
        None => sys::sockopt_int(fd, libc::IPPROTO_TCP, libc::TCP_INQ).is_ok_and(|on| on != 0),
    };
    if tells {
        put_unread(m, room, still_unread(fd, conn));
    }
}

/// How many bytes the program has not taken, as `TCP_INQ` has them counted: an end that has come is one more, so that who is
/// told of it asks once more. Source: `tcp_inq_hint` in linux/net/ipv4/tcp.c, where a FIN has its place in the sequence.
fn still_unread(fd: c_int, conn: Option<&Conn>) -> c_int {
    let known = conn.and_then(|c| {
        let mut b = (!c.rx_lock.held_by_me() && !c.tx_lock.held_by_me()).then(|| c.lock_both())?;
        let n = unread(&mut b.rx);
        let over = c.fin_seen() || c.has_ended(END_EOF) && !c.has_ended(END_RESET);
        (b.rx.path() != RxPath::Tcp).then_some(n as c_int + c_int::from(over))
    });
    known.unwrap_or_else(|| {
        let over = sys::poll_now(fd, libc::POLLRDHUP) & libc::POLLRDHUP != 0;
        sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0) + c_int::from(over)
    })
}

/// Control data with the one number, as much of it as there is room for. Source: `put_cmsg` in linux/net/core/scm.c.
fn put_unread(m: &mut msghdr, room: usize, n: c_int) {
    #[repr(C)]
    struct Unread {
        header: libc::cmsghdr,
        n: c_int,
    }
    // SAFETY: sums of constants.
    let (whole, space) = unsafe { (libc::CMSG_LEN(4) as usize, libc::CMSG_SPACE(4) as usize) };
    let fits = whole.min(room);
    if fits < whole {
        m.msg_flags |= libc::MSG_CTRUNC;
    }
    if m.msg_control.is_null() || room < size_of::<libc::cmsghdr>() {
        m.msg_flags |= libc::MSG_CTRUNC;
        return;
    }
    // SAFETY: all-zero is one.
    let mut told = Unread { header: unsafe { core::mem::zeroed() }, n };
    told.header.cmsg_len = fits as _;
    told.header.cmsg_level = libc::IPPROTO_TCP;
    told.header.cmsg_type = libc::TCP_INQ;
    // SAFETY: no more than there is of it; to where the program has said that there is room.
    if unsafe { copy::copy((&raw const told).cast(), m.msg_control.cast(), fits) }.is_ok() {
        m.msg_controllen = space.min(room) as _;
    }
}
