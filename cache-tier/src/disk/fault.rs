//! Reads of mapped files that fail: a page behind the end of a file that was cut short, or on a medium that errs.
//!
//! Such a read raises SIGBUS, whose default is the end of the process. The handler here knows the mapped segments: it maps a
//! zero page over the one that failed and marks the segment lost; the read goes on with zeros, which no checksum takes
//! for a block. Any other SIGBUS goes to the handler that was there before. Systems without the
//! signal read segments by calls that return errors (`Segment::read`).

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Ranges that can be known at once: as many as there are segments.
const MAX_RANGES: usize = super::slots::MAX_SEGMENTS;

/// A mapped range, as the handler finds it: without a lock. A base of zero is a free place.
struct Range {
    base: AtomicUsize,
    len: AtomicUsize,
    lost: AtomicBool,
}

static RANGES: [Range; MAX_RANGES] =
    [const { Range { base: AtomicUsize::new(0), len: AtomicUsize::new(0), lost: AtomicBool::new(false) } }; MAX_RANGES];

/// A mapped range that the handler knows, until dropped.
#[derive(Debug)]
pub struct Guarded(usize);

impl Guarded {
    /// Makes a mapping known; `None` where too many are.
    pub fn new(map: &[u8]) -> Option<Self> {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        for (number, range) in RANGES.iter().enumerate() {
            if range.len.load(Ordering::Relaxed) == 0
                && range.len.compare_exchange(0, map.len(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                range.lost.store(false, Ordering::Relaxed);
                range.base.store(map.as_ptr() as usize, Ordering::Release);
                return Some(Self(number));
            }
        }
        None
    }

    /// Whether a read of it has failed.
    pub fn is_lost(&self) -> bool {
        RANGES[self.0].lost.load(Ordering::Acquire)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        RANGES[self.0].base.store(0, Ordering::Release);
        RANGES[self.0].len.store(0, Ordering::Release);
    }
}

#[cfg(not(unix))]
fn install() {}

#[cfg(unix)]
fn install() {
    signal::install();
}

#[cfg(unix)]
mod signal {
    //! The handler. It calls nothing but `mmap` and `sigaction`, which are plain system calls, and takes no lock.

    use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

    use super::RANGES;

    type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

    static PAGE: AtomicUsize = AtomicUsize::new(0);
    static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

    pub fn install() {
        // SAFETY: sysconf and sigaction are called with valid arguments; `previous` is leaked, so the handler may read it
        // whenever it runs; the handler itself keeps to what may be called in one.
        unsafe {
            let page = usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).unwrap_or(4096);
            PAGE.store(page, Ordering::Relaxed);
            let previous: *mut libc::sigaction = Box::leak(Box::new(std::mem::zeroed()));
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: Handler = on_bus_error;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&raw mut action.sa_mask);
            if libc::sigaction(libc::SIGBUS, std::ptr::null(), previous) == 0 {
                PREVIOUS.store(previous, Ordering::Release);
                libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
            }
        }
    }

    extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: the kernel passes a valid siginfo to a handler that was installed with SA_SIGINFO.
        let address = unsafe { (*info).si_addr() } as usize;
        if !mend(address) {
            pass_on(signal, info, context);
        }
    }

    /// Maps a zero page over the one that failed, if it is ours.
    fn mend(address: usize) -> bool {
        let page = PAGE.load(Ordering::Relaxed);
        for range in &RANGES {
            let (base, len) = (range.base.load(Ordering::Acquire), range.len.load(Ordering::Acquire));
            if base == 0 || address < base || address >= base + len {
                continue;
            }
            range.lost.store(true, Ordering::Release);
            let start = address / page * page;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: the page lies in a mapping of ours, which stays mapped while its range is registered, and nobody
            // writes through it: replacing it by a page of zeros changes only what readers see.
            let mapped = unsafe { libc::mmap(start as *mut libc::c_void, page, libc::PROT_READ, flags, -1, 0) };
            return mapped != libc::MAP_FAILED;
        }
        false
    }

    /// Calls the handler that was there before, or ends the process as if there were none.
    fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        let previous = PREVIOUS.load(Ordering::Acquire);
        // SAFETY: `previous` is null or leaked by `install`; its handler is called as it was registered. With the default
        // action restored, returning repeats the read, which then ends the process.
        unsafe {
            match previous.as_ref() {
                Some(action) if action.sa_sigaction > 1 && action.sa_flags & libc::SA_SIGINFO != 0 => {
                    let handler: Handler = std::mem::transmute(action.sa_sigaction);
                    handler(signal, info, context);
                }
                _ => {
                    let mut default: libc::sigaction = std::mem::zeroed();
                    default.sa_sigaction = libc::SIG_DFL;
                    libc::sigaction(signal, &raw const default, std::ptr::null_mut());
                }
            }
        }
    }
}
