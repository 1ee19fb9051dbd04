//! Sockets: one listening socket for each address and worker, so that the kernel spreads connections over the workers.

use std::{io, net::SocketAddr, num::NonZeroUsize, time::Duration};

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::TcpStream;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// An address can't be listened on.
#[derive(Debug, thiserror::Error)]
#[error("can't listen on {address}: {source}{}", hint(.source))]
pub struct BindError {
    address: SocketAddr,
    source: io::Error,
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; another process does, choose another port or stop it",
        io::ErrorKind::PermissionDenied => "; ports below 1024 need a privilege, choose a higher one",
        _ => "",
    }
}

/// The listening sockets of every worker.
#[derive(Debug)]
pub struct Listeners {
    /// For each worker one socket for each address.
    pub of_workers: Vec<Vec<std::net::TcpListener>>,
    /// The addresses, with the ports that the kernel chose where 0 was asked for.
    pub addresses: Vec<SocketAddr>,
}

/// Binds every address once for each worker.
pub fn bind(addresses: &[SocketAddr], workers: NonZeroUsize) -> Result<Listeners, BindError> {
    let mut of_workers: Vec<Vec<_>> = (0..workers.get()).map(|_| Vec::new()).collect();
    let mut bound = Vec::new();
    for &address in addresses {
        let mut actual = address;
        for (worker, sockets) in of_workers.iter_mut().enumerate() {
            let socket = listen(actual, worker == 0).map_err(|source| BindError { address, source })?;
            actual = socket.local_addr().map_err(|source| BindError { address, source })?;
            sockets.push(socket);
        }
        bound.push(actual);
    }
    Ok(Listeners { of_workers, addresses: bound })
}

/// An address is first bound without sharing, so that a second Tollgate is told that the port is taken instead of
/// quietly getting half of the connections.
fn listen(address: SocketAddr, is_first: bool) -> io::Result<std::net::TcpListener> {
    if is_first {
        new_socket(address)?.bind(&address.into())?;
    }
    let socket = new_socket(address)?;
    socket.set_reuse_port(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

fn new_socket(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        // `[::]` means every address, of both families.
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// The kernel waits longer than a connection's pulse, so that the log tells why it ended. It alone notices a client that
/// is gone while the rest of its answer is in the kernel's buffers.
const KERNEL_PATIENCE: Duration = Duration::from_secs(5);

/// Settings of an accepted connection. Data that the client does not take for `write_timeout` and a little ends it.
pub(super) fn prepare(socket: &TcpStream, write_timeout: Duration) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let options = SockRef::from(socket);
    let keepalive =
        TcpKeepalive::new().with_time(Duration::from_secs(60)).with_interval(Duration::from_secs(15));
    options.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    options.set_tcp_user_timeout(Some(write_timeout + KERNEL_PATIENCE))?;
    #[cfg(not(target_os = "linux"))]
    let _ = write_timeout;
    Ok(())
}
