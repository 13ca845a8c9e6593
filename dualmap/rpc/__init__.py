"""gRPC plumbing: conversion, status, interceptors, server, clients."""
